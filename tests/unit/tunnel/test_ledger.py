from __future__ import annotations

import torch

from shardwise.tunnel.ledger import Ledger, held_bytes, resizes_seen


def test_a_storage_counts_once_and_until_its_end() -> None:
    ledger = Ledger()
    first = torch.zeros(100)
    ledger.note(first)
    ledger.note(first[10:].view(3, 30))
    assert ledger.peak().total == 400
    view = first[:1]
    del first
    second = torch.zeros(50)
    ledger.note(second)
    assert ledger.peak().total == 600, "a view keeps the whole storage"
    del view
    ledger.note(torch.zeros(25))
    assert ledger.peak().total == 600


def test_classes_may_be_given_late() -> None:
    ledger = Ledger()
    ledger.moment = "backward"
    kept, dropped = torch.zeros(10), torch.zeros(20)
    ledger.note(kept)
    ledger.note(dropped)
    del dropped
    ledger.moment = "update"
    ledger.classify([kept], "grads")
    peak = ledger.peak()
    assert peak.moment == "backward"
    assert peak.classes == {"grads": 40, "activations": 80}
    assert ledger.class_of(kept[1:]) == "grads"


def test_what_is_held_elsewhere_is_left_out() -> None:
    ledger = Ledger()
    params, gathered = torch.zeros(1000), torch.zeros(10)
    ledger.classify([params], "params")
    ledger.classify([gathered], "gathered")
    assert ledger.peak(leave_out=["params"]).total == 40


def test_resized_storages_are_gathered_parameters() -> None:
    ledger = Ledger()
    gathered = torch.zeros(100)
    ledger.note(gathered)
    with resizes_seen(ledger):
        gathered.untyped_storage().resize_(0)
        other = torch.zeros(80)
        ledger.note(other)
        gathered.untyped_storage().resize_(400)
    peak = ledger.peak()
    assert peak.total == 720
    assert peak.classes == {"gathered": 400, "other": 320}
    assert ledger.peak().largest == {"gathered": 400, "other": 320}
    gathered.untyped_storage().resize_(0)
    assert ledger.peak().total == 720, "after the block nobody looks"


def test_held_bytes_count_shared_storage_once() -> None:
    whole = torch.zeros(64)
    assert held_bytes([whole, whole[8:], torch.zeros(2, dtype=torch.bfloat16)], "cpu") == 260
    assert held_bytes([whole], "cuda") == 0
