"""The arithmetic of policies at once, what is counted as memory, and the whole of it on real parts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtest import multipolicy
from loadtest.multipolicy import Measured, Plan, Way
from loadtest.multipolicy.grpo import Shape, learnt
from loadtest.multipolicy.residents import Residents, Size
from loadtest.training.memory import PeakMemory, host_bytes
from tests.loadtest.tiny import tiny_base


def test_the_speedup_is_of_turns_beside_each_other() -> None:
    found = Measured(
        sequential=[Way(10.0, [], 100, 0), Way(30.0, [], 100, 0), Way(12.0, [], 100, 0)],
        concurrent=[Way(5.0, [], 101, 0), Way(10.0, [], 104, 0), Way(6.0, [], 102, 0)],
    )
    summary = found.summary(3)
    assert (summary["policies"], summary["sequential_s"], summary["concurrent_s"]) == (3, 12.0, 6.0)
    assert summary["speedup"] == 2.0
    # what an allocator has had by then, it keeps
    assert summary["peak_memory_ratio"] == 1.01


def test_the_memory_that_counts_is_the_gpus_where_there_is_one() -> None:
    found = Measured([Way(10.0, [], 100, 1000)], [Way(5.0, [], 150, 1010)])
    assert found.summary(3)["peak_memory_ratio"] == 1.01
    assert found.summary(3)["peak_host_memory_ratio"] == 1.5


def test_what_was_not_measured_is_absent() -> None:
    assert Measured([Way(10.0, [], 100, 0)]).summary(3) == {"policies": 3}


def test_a_crowd_is_compared_with_the_same_rounds_quiet() -> None:
    found = Residents(
        49, [[1.0, 1.0, 9.0], [2.0, 2.0, 2.0]], [[1.02, 1.0, 1.02], [2.0, 2.08, 2.08]], 1000, 1000, [1040]
    )
    assert found.summary() == {
        "resident_policies": 50, "resident_forward_backward_ratio": 1.03, "resident_memory_over_state": 1.0,
        "resident_memory_grown_over_state": 1.04,
    }  # fmt: skip


def test_a_groups_advantages_sum_to_nothing_and_fall_on_what_was_sampled() -> None:
    group = [{"tokens": [2, 4, 6], "logprobs": [-0.1, -0.2, -0.3]}, {"tokens": [1, 3, 4], "logprobs": [-1.0] * 3}]
    data = learnt([7, 8], group)
    inputs = [one["loss_fn_inputs"] for one in data]
    assert data[0]["model_input"]["chunks"][0]["tokens"] == [7, 8, 2, 4]
    assert inputs[0]["target_tokens"]["data"] == [8, 2, 4, 6]
    assert inputs[0]["logprobs"]["data"] == [0.0, -0.1, -0.2, -0.3]
    first, second = (one["advantages"]["data"] for one in inputs)
    assert first[0] == second[0] == 0.0
    assert first[1] > 0
    np.testing.assert_allclose(first, np.negative(second), atol=1e-6)


def test_the_peak_is_of_all_that_descend() -> None:
    """A grandchild's memory counts, and goes on counting when it is gone."""
    size = 200 << 20
    inner = f"import time; held = bytearray({size}); print('held', flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    before = host_bytes([os.getpid()])
    with PeakMemory([os.getpid()], gpu=False) as peak:
        child = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, start_new_session=True)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"held\n"
            time.sleep(0.6)
        finally:
            os.killpg(child.pid, 9)
            child.wait()
            child.stdout.close()
        time.sleep(0.3)
    assert peak.host - before > size


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_policies_at_once_on_real_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    monkeypatch.setattr(multipolicy, "make_base", lambda device, folder, seed: tiny_base(folder))
    plan = Plan(2, 1, Shape(prompts=2, group=2, prompt=8, tokens=6, steps=2, rank=8), Size(3, 2, 16, 2, 1))
    monkeypatch.setitem(multipolicy.PLANS, ("cpu", "small"), plan)
    plot = tmp_path / "multipolicy.svg"
    summary = multipolicy.run(tmp_path / "multipolicy.json", small=True, seed=1, device="cpu", plot=plot)
    report = msgspec.json.decode((tmp_path / "multipolicy.json").read_bytes())
    assert report["summary"] == summary
    assert summary.keys() >= {"policies", "sequential_s", "concurrent_s", "speedup", "peak_memory_ratio"}
    assert summary["resident_policies"] == 4
    assert 1.0 <= summary["resident_memory_over_state"] < 1.05
    assert [len(steps) for steps in report["samples"]["concurrent"][0]["steps"]] == [2, 2]
    assert "<svg" in plot.read_text()
