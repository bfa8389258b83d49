"""An install on a worker, step by step: what happens to its extent meanwhile, and to its slot after a failure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from backends.arena import header
from backends.arena.segment import Segments
from backends.extent_path import ExtentPath
from backends.interface import Installable
from backends.vllm import versions, worker
from backends.vllm.arena import install
from backends.vllm.arena.cpu import CpuWriter, Done
from backends.vllm.arena.install import Installer
from backends.vllm.arena.plan import Plan
from backends.vllm.terms import FAILED, OUT_OF_REACH, PENDING, REFUSED
from packer.revision import RevisionFile
from tests.backends.support import SharedArena
from tests.backends.vllm.arena.test_plan import BASE, SLOTS, Worker, packed
from tests.packer import moe


class Manager:
    """What an install touches of vLLM's adapter manager."""

    def __init__(self) -> None:
        self._registered_adapters: dict[int, Any] = {}
        self._active_adapters: dict[int, None] = {}
        self.lora_index_to_id: list[int | None] = [None] * SLOTS

    def remove_adapter(self, lora_id: int) -> bool:
        self._active_adapters.pop(lora_id, None)
        self.lora_index_to_id = [None if one == lora_id else one for one in self.lora_index_to_id]
        return self._registered_adapters.pop(lora_id, None) is not None


class Late(CpuWriter):
    """A device that writes when it is told to: by ``go``, or by whoever waits."""

    def __init__(self) -> None:
        self.before: Callable[[], None] = lambda: None
        self._work: Callable[[], Done] | None = None

    def write(self, plan: Plan, data: memoryview, slot: int, scales: npt.NDArray[np.float32]) -> Any:
        copied = memoryview(bytes(data))
        self._work = lambda: CpuWriter.write(self, plan, copied, slot, scales)
        return self

    def go(self) -> None:
        if self._work is not None:
            self.before()
            self._work()
            self._work = None

    def done(self) -> bool:
        return self._work is None

    def wait(self) -> None:
        self.go()


class Stage:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._numbers = itertools.count()
        self.stacks = Worker()
        self.manager = Manager()
        self.writer = Late()
        self.arena = SharedArena("install", 1 << 20)
        segments = Segments(self.writer)
        installer = Installer(self.manager, self.stacks.adaptable, self.writer, segments)
        self.worker = SimpleNamespace(
            roost_installer=installer, model_runner=SimpleNamespace(lora_manager=self.manager)
        )

    def put(self, seed: int, *targets: str) -> Installable:
        tensors = {
            name: tensor
            for name, tensor in moe.per_expert(BASE, 3, seed=seed).items()
            if any(f".{target}." in name for target in targets or ("q_proj", "experts"))
        }
        data = packed(tensors, self.root / str(next(self._numbers)))
        return self.arena.put_bytes(data, RevisionFile(data).digest(), 3)

    def add(self, lora_id: int, path: str) -> str:
        request = SimpleNamespace(lora_int_id=lora_id, lora_name=f"acme@{lora_id}", lora_path=path)
        return worker.add_lora(self.worker, request)  # type: ignore[arg-type]

    def holds(self, slot: int, adapter: Installable) -> bool:
        expected = self.stacks.expected(bytes(adapter.view()))
        return all(torch.equal(one[slot], wanted) for one, wanted in zip(self.stacks.stacks(), expected, strict=True))

    def check_nothing_is_taken(self) -> None:
        assert self.manager.lora_index_to_id == [None] * SLOTS
        assert not self.manager._registered_adapters
        assert not self.manager._active_adapters


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.arena.close()


def path_of(adapter: Installable) -> str:
    return str(ExtentPath(adapter.segment, adapter.offset, adapter.length, adapter.generation, adapter.digest))


def test_an_adapter_is_whole_when_its_write_is_done(stage: Stage) -> None:
    first, second = stage.put(1), stage.put(2)
    for lora_id, adapter in ((11, first), (12, second)):
        assert stage.add(lora_id, path_of(adapter)) == PENDING
        assert worker.finish_lora(stage.worker, lora_id, False) == PENDING
        stage.writer.go()
        assert worker.finish_lora(stage.worker, lora_id, False) == ""
    assert stage.manager.lora_index_to_id == [11, 12, None]
    assert stage.holds(0, first)
    assert stage.holds(1, second)
    with pytest.raises(RuntimeError, match="can't be activated again"):
        stage.manager._registered_adapters[11].get_lora("model.layers.0.self_attn.qkv_proj")


@pytest.mark.parametrize("wait", [False, True])
def test_an_extent_given_away_during_the_write_is_noticed_after_it(stage: Stage, wait: bool) -> None:
    adapter = stage.put(1)
    stage.writer.before = lambda: stage.arena.give_away(adapter)
    assert stage.add(11, path_of(adapter)) == PENDING
    if not wait:
        stage.writer.go()
    assert worker.finish_lora(stage.worker, 11, wait).startswith(f"{FAILED}extent")
    stage.check_nothing_is_taken()
    other = stage.put(2)
    assert stage.add(12, path_of(other)) == PENDING
    assert worker.finish_lora(stage.worker, 12, True) == ""
    assert stage.holds(0, other)


def test_a_segment_given_up_during_the_write_is_noticed_after_it(stage: Stage) -> None:
    adapter = stage.put(1)
    stage.writer.before = stage.arena.renew
    assert stage.add(11, path_of(adapter)) == PENDING
    assert worker.finish_lora(stage.worker, 11, True).startswith(f"{FAILED}segment")
    stage.check_nothing_is_taken()


def test_a_slot_is_free_only_when_nothing_writes_to_it_any_more(stage: Stage) -> None:
    """Another worker failed, so all drop the adapter: this one's write must have ended before its slot is free."""
    adapter = stage.put(1)
    assert stage.add(11, path_of(adapter)) == PENDING
    worker.drop_lora(stage.worker, 11)
    assert stage.writer.done()
    stage.check_nothing_is_taken()
    worker.drop_lora(stage.worker, 11)


def test_a_device_that_fails_costs_no_slot(stage: Stage) -> None:
    def fail() -> None:
        raise RuntimeError("the device is lost")

    stage.writer.before = fail
    assert stage.add(11, path_of(stage.put(1))) == PENDING
    assert worker.finish_lora(stage.worker, 11, True) == f"{FAILED}the device is lost"
    stage.check_nothing_is_taken()


def test_an_extent_that_changes_under_the_header_is_stale_and_nothing_of_it_is_kept(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, during and after the header's copy: never the adapter's fault, and never another one's layout."""
    other = stage.put(2, "q_proj")
    data = bytes(other.view())
    for garbled in (True, False):
        adapter = stage.put(1)

        def copy(file: memoryview, adapter: Installable = adapter, garbled: bool = garbled) -> bytes:
            before = header.copy_header(file)
            stage.arena.give_away(adapter)
            if not garbled:
                stage.arena.put_bytes(data, other.digest, 3, over=adapter)
            return header.copy_header(file) if garbled else before

        with monkeypatch.context() as patched:
            patched.setattr(install, "copy_header", copy)
            assert stage.add(11, path_of(adapter)).startswith(f"{FAILED}extent")
        stage.check_nothing_is_taken()
    again = stage.put(1)
    for lora_id, adapter, slot in ((12, again, 0), (13, other, 1)):
        assert stage.add(lora_id, path_of(adapter)) == PENDING
        assert worker.finish_lora(stage.worker, lora_id, True) == ""
        assert stage.holds(slot, adapter)


def test_a_write_that_fails_at_once_costs_no_slot(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("the copy failed")

    with monkeypatch.context() as patched:
        patched.setattr(stage.writer, "write", fail)
        assert stage.add(11, path_of(stage.put(1))) == f"{FAILED}the copy failed"
    stage.check_nothing_is_taken()
    assert worker.finish_lora(stage.worker, 11, False) == "", "it is not under way"
    assert stage.add(12, path_of(stage.put(2))) == PENDING


def test_an_engine_is_tried_out_before_it_serves(stage: Stage) -> None:
    installer = stage.worker.roost_installer
    installer.try_out()
    assert all(not stack[0].any() and (stack[1:] == 7.0).all() for stack in stage.stacks.stacks())
    stage.check_nothing_is_taken()
    place, linear = next(iter(stage.stacks.linears.items()))
    stage.stacks.linears[place] = linear._replace(a=linear.a.float())
    with pytest.raises(RuntimeError, match=r"dtypes \['torch.bfloat16', 'torch.float32'\], not one"):
        installer.try_out()


def test_an_unknown_vllm_can_not_read_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "WORKER_SEAMS", {"vllm.lora.lora_model:LoRAModel.get_lora": ("self", "another")})
    found = SimpleNamespace()
    assert "takes" in worker.prepare(found)
    assert found.roost_installer is None


def test_attributes_that_are_missing_are_named() -> None:
    versions.check_attributes(Manager(), ("lora_index_to_id", "_registered_adapters", "_active_adapters"))
    with pytest.raises(versions.UnsupportedVllm, match="Manager has no lora_config"):
        versions.check_attributes(Manager(), versions.MANAGER_ATTRIBUTES)


def test_a_driver_that_comes_has_old_segments_let_go(stage: Stage) -> None:
    adapter = stage.put(1)
    assert stage.add(11, path_of(adapter)) == PENDING
    assert worker.finish_lora(stage.worker, 11, True) == ""
    stage.arena.renew()
    maps = Path("/proc/self/maps")
    before = maps.read_text().count(adapter.segment)
    worker.targets(stage.worker)
    assert maps.read_text().count(adapter.segment) == before - 1


def test_no_slot_no_install(stage: Stage) -> None:
    stage.manager.lora_index_to_id = [1, 2, 3]
    assert stage.add(11, path_of(stage.put(1))) == f"{FAILED}no free slot: 3 of 3 are taken"
    assert stage.manager.lora_index_to_id == [1, 2, 3]


def test_what_is_wrong_is_told_by_whose_fault_it_is(stage: Stage) -> None:
    adapter = stage.put(1)
    path = path_of(adapter)
    stage.arena.put_bytes(b"no revision", "0" * 64, 3)
    garbage = path_of(stage.arena.put_bytes(b"no revision", "0" * 64, 3))
    assert stage.add(11, path.replace("digest=", "digest=x")).startswith(f"{REFUSED}digest")
    assert stage.add(11, garbage).startswith(f"{REFUSED}revision file")
    assert stage.add(11, path.replace("generation=", "generation=9")).startswith(f"{FAILED}extent")
    assert stage.add(11, path.replace("///roost-", "///roost-no-")).startswith(f"{OUT_OF_REACH}segment")
    stage.worker.roost_installer = None
    assert stage.add(11, path).startswith(f"{OUT_OF_REACH}this engine could not make ready")
    stage.check_nothing_is_taken()
