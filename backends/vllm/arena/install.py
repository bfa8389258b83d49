"""An install through the arena on one worker: everything is checked first, and a failure leaves the slot free.

Between ``begin`` and the end of its write an adapter has its slot and cannot be asked for: the core tells nobody of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest

from backends import extent_path
from backends.arena.cache import LruCache
from backends.arena.header import Headers, Layout, copy_header
from backends.arena.segment import Segment, Segments
from backends.extent_path import ExtentPath
from backends.vllm.terms import PENDING

from .adaptable import Adaptable
from .plan import Plan
from .writer import Pending, SlotWriter

# plans are small beside a model; targets times ranks is what tells them apart
_MAX_PLANS = 64
# data that no move reads
_NOTHING = memoryview(bytes(64))


class Written(LoRAModel):  # type: ignore[misc]
    """An adapter whose numbers are in its slot and nowhere else."""

    def __init__(self, lora_id: int, rank: int) -> None:
        super().__init__(lora_id, rank, {})

    def get_lora(self, module_name: str) -> Any:
        raise RuntimeError(f"adapter {self.id} was written into its slot once and can't be activated again")


class _Install(NamedTuple):
    extent: ExtentPath
    segment: Segment
    pending: Pending


class Installer:
    """``manager`` is vLLM's adapter manager. All calls come from the worker's main thread."""

    def __init__(self, manager: Any, adaptable: Adaptable, writer: SlotWriter, segments: Segments) -> None:
        self.adaptable = adaptable
        self._manager = manager
        self._writer = writer
        self._segments = segments
        self._headers = Headers()
        self._plans: LruCache[Layout, Plan] = LruCache(_MAX_PLANS)
        self._under_way: dict[int, _Install] = {}

    def begin(self, request: LoRARequest) -> str:
        """Start to write an adapter: PENDING, or "" where that is over already.

        Raises ValueError (the adapter, or the path's spelling, will never do), StaleExtent, OutOfReach, OSError or
        RuntimeError.
        """
        extent = extent_path.parse(request.lora_path)
        segment = self._segments.get(extent.segment)
        segment.check(extent)
        file = segment.data(extent)
        header = copy_header(file)
        # it is the extent's only if that has not been given away meanwhile
        segment.check(extent)
        revision = self._headers.read(header, extent.length)
        plan = self._plans.get(revision.layout, lambda: self.adaptable.plan(revision.layout))
        slot = self._free_slot()
        rank = max(shape.pair.rank for shape in revision.layout.shapes)
        written = Written(request.lora_int_id, rank)
        pending = self._writer.write(plan, file[revision.data_start :], slot, revision.scales)
        self._take(slot, written)
        self._under_way[request.lora_int_id] = _Install(extent, segment, pending)
        return self.finish(request.lora_int_id, wait=False)

    def try_out(self) -> None:
        """Write an adapter that has no tensors into a free slot. Raises what any write would for these stacks.

        It also brings everything about that the first install would otherwise wait for.
        """
        plan = self.adaptable.plan(Layout((), "BF16", _NOTHING.nbytes))
        self._writer.write(plan, _NOTHING, self._free_slot(), np.ones(1, np.float32)).wait()

    def drop_old_segments(self) -> None:
        """Let go of what no sidecar has any more."""
        self._segments.drop_old()

    def finish(self, lora_id: int, *, wait: bool) -> str:
        """PENDING, or "" once the adapter is whole in its slot. Raises StaleExtent where it is something else."""
        install = self._under_way.get(lora_id)
        if install is None:
            return ""
        if wait:
            install.pending.wait()
        elif not install.pending.done():
            return PENDING
        del self._under_way[lora_id]
        install.segment.check(install.extent)
        return ""

    def abandon(self, lora_id: int) -> None:
        """Free the slot of an adapter that is not whole, once nothing writes to it any more."""
        install = self._under_way.pop(lora_id, None)
        try:
            if install is not None:
                install.pending.wait()
        finally:
            self._manager.remove_adapter(lora_id)

    def _free_slot(self) -> int:
        ids = self._manager.lora_index_to_id
        if None not in ids:
            raise RuntimeError(f"no free slot: {len(ids)} of {len(ids)} are taken")
        return int(ids.index(None))

    def _take(self, slot: int, adapter: Written) -> None:
        """Register the adapter as loaded and active, as ``add_adapter`` and ``activate_adapter`` would."""
        self._manager._registered_adapters[adapter.id] = adapter
        self._manager._active_adapters[adapter.id] = None
        self._manager.lora_index_to_id[slot] = adapter.id
