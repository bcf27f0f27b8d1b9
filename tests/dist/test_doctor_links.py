"""Faults between two namespaces, each named by the doctor within a minute."""

from __future__ import annotations

import pytest

from broken_links import FAULTS, Fault, seconds_to_name
from namespaces import why_not_here


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_between_nodes_is_named(fault: Fault) -> None:
    reason = why_not_here()
    if reason is not None:
        pytest.skip(reason)
    seconds, said = seconds_to_name(fault)
    assert said.startswith(tuple(fault.checks) or "nothing is named"), said
    assert seconds < 60
