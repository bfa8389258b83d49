"""What the simulator's tests share: constants that are easy to reckon with, and runs in virtual time."""

from __future__ import annotations

from typing import Any

from gateway.leases import LeaseDesk
from loadtest.simulate.constants import EngineConstants

SIZE = 100_000


def constants(**changes: Any) -> EngineConstants:
    """Steps of a second that nothing lengthens, installs of two, everything else at once."""
    values: dict[str, Any] = {
        "step_s": 1.0, "sequence_s": 0.0, "prefill_s": 0.0, "adapters_s": 0.0, "adapter_s": 0.0,
        "adapter_prompt_s": 0.0, "adapter_prefill_s": 0.0, "request_s": 0.0, "front_s": 0.0, "install_s": 2.0,
        "install_byte_s": 0.0, "prepare_s": 0.0, "remove_s": 0.5, "stock_install_s": 20.0, "fetch_s": 0.1,
        "fetch_byte_s": 0.0, "start_s": 30.0, "adapter_bytes": SIZE,
    }  # fmt: skip
    return EngineConstants(**{**values, **changes})


def quick(**changes: Any) -> EngineConstants:
    """As a small engine on a quiet machine is."""
    values: dict[str, Any] = {
        "step_s": 0.02, "sequence_s": 0.0005, "adapter_s": 0.0005, "prefill_s": 0.0001, "request_s": 0.002,
        "adapters_s": 0.005, "adapter_prompt_s": 0.001, "adapter_prefill_s": 0.0001, "front_s": 0.0005,
        "install_s": 0.02, "prepare_s": 0.005, "remove_s": 0.002, "fetch_s": 0.005, "start_s": 5.0,
    }  # fmt: skip
    return constants(**{**values, **changes})


def forget_releases(desk: LeaseDesk) -> None:
    """In place of ``LeaseDesk.flush``: what was collected is sent to nobody."""
    desk._flush_timer = None
    desk._returned.clear()
