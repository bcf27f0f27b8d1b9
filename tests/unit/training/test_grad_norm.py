"""Norms of gradients in host memory: by several threads, to the last bit those of one."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from shardwise.internals.functions import norm_of_each
from shardwise.internals.peerless import FakeTensorMode
from shardwise.training import grad_norm


def test_threads_share_the_gradients_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()

    def noted(tensors: list[Tensor]) -> list[Tensor]:
        used.add(threading.current_thread().name)
        return norm_of_each(tensors)

    monkeypatch.setattr(grad_norm, "norm_of_each", noted)
    monkeypatch.setattr(grad_norm, "_MANY", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    grads = [torch.randn(size, 7) for size in (1, 300, 41)]
    norms = grad_norm._norms_of(grads)
    assert threading.current_thread().name not in used
    assert all(map(torch.equal, norms, norm_of_each(grads)))


def test_few_gradients_need_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_norm, "ThreadPoolExecutor", None)
    grads = [torch.ones(3), torch.ones(5)]
    assert all(map(torch.equal, grad_norm._norms_of(grads), norm_of_each(grads)))


def test_tensors_without_data_are_counted_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their mode is not made for several."""
    monkeypatch.setattr(grad_norm, "ThreadPoolExecutor", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    with FakeTensorMode():
        norms = grad_norm._norms_of([torch.empty(2**13, 2**12) for _ in range(3)])
    assert [norm.shape for norm in norms] == [torch.Size([])] * 3
