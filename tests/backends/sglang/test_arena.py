"""A slot of SGLang's memory pool, written from the arena: read back as SGLang's kernels read it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.arena.segment import OutOfReach, StaleExtent
from backends.extent_path import extent_of
from backends.sglang.arena import ArenaReader, Written
from backends.sglang.terms import TARGETS
from packer.modules import Place
from packer.peft import pack_peft
from packer.shape import BaseShape
from tests.backends.sglang.test_folder import DENSE, EXPERTS, PARAMETERS, deltas_of, revision_of, some
from tests.backends.support import SharedArena
from tests.packer.moe import base, config, folder_of, outer, per_expert, stacked
from wire.outcomes import Unfit

SLOTS, MAX_RANK, SLOT = 3, 8, 1


class Pool:
    """A manager with buffers as SGLang's memory pool makes them for ``shape``, full of an earlier adapter."""

    def __init__(self, shape: BaseShape) -> None:
        self.shape = shape
        self.device = torch.device("cpu")
        layers, modules = shape.layers, shape.modules[0]
        heads = modules["q"].outputs, modules["k"].outputs
        split = SimpleNamespace(base_layer=SimpleNamespace(q_proj_shard_size=heads[0], kv_proj_shard_size=heads[1]))
        self.lora_modules: list[dict[str, Any]] = [{"qkv_proj": split} for _ in range(layers)]
        a: dict[str, list[torch.Tensor]] = {}
        b: dict[str, list[torch.Tensor]] = {}

        def add(name: str, stack: tuple[int, ...], parts: int, inputs: int, outputs: int) -> None:
            a[name] = [torch.full((SLOTS, *stack, parts * MAX_RANK, inputs), 9.0) for _ in range(layers)]
            b[name] = [torch.full((SLOTS, *stack, outputs, MAX_RANK), 9.0) for _ in range(layers)]

        add("qkv_proj", (), 3, modules["q"].inputs, heads[0] + 2 * heads[1])
        add("o_proj", (), 1, modules["o"].inputs, modules["o"].outputs)
        experts = modules.get("experts.gate")
        prefix, suffix = ("experts.", "_moe") if experts else ("", "")
        stack = (experts.experts,) if experts else ()
        gate, down = modules[f"{prefix}gate"], modules[f"{prefix}down"]
        add(f"gate_up_proj{suffix}", stack, 2, gate.inputs, 2 * gate.outputs)
        add(f"down_proj{suffix}", stack, 1, down.inputs, down.outputs)
        self.memory_pool = SimpleNamespace(
            A_buffer=a, B_buffer=b, tp_size=1, moe_ep_size=1, max_lora_rank=MAX_RANK, num_layer=layers
        )

    def delta(self, place: Place, written: Written) -> torch.Tensor:
        """By how much the slot changes a module: dense parts are as close as the rank, experts' as the largest one."""
        module = place.module.removeprefix("experts.")
        group = next(names for names in (("q", "k", "v"), ("gate", "up"), ("o",), ("down",)) if module in names)
        name = {"q": "qkv_proj", "gate": "gate_up_proj", "o": "o_proj", "down": "down_proj"}[group[0]]
        name += "_moe" if place.expert else ""
        pool = self.memory_pool
        a, b = pool.A_buffer[name][place.layer][SLOT], pool.B_buffer[name][place.layer][SLOT]
        outputs = [self.shape.modules[place.layer][place.module.replace(module, one)].outputs for one in group]
        part = group.index(module)
        rows = slice(sum(outputs[:part]), sum(outputs[: part + 1]))
        spacing = MAX_RANK if place.expert else written.rank
        product: torch.Tensor = b[..., rows, :spacing] @ a[..., part * spacing : (part + 1) * spacing, :]
        return product if place.expert else written.scaling * product


@pytest.fixture
def arena() -> Iterator[SharedArena]:
    arena = SharedArena("sglang-pool", 16 << 20)
    yield arena
    arena.close()


CASES: dict[str, Any] = {
    "dense": (DENSE, lambda: per_expert(DENSE, 4), {"rank": 4}),
    "dense, rsLoRA at the largest rank": (DENSE, lambda: per_expert(DENSE, 8), {"rank": 8, "use_rslora": True}),
    "dense, alphas that differ": (DENSE, lambda: per_expert(DENSE, 4), {"rank": 4, "alpha_pattern": {"k_proj": 3}}),
    "dense, ranks that differ": (
        DENSE,
        lambda: some(per_expert(DENSE, 4), "q_proj", "up_proj") | some(per_expert(DENSE, 2), "o_proj", "v_proj"),
        {"rank": 4, "rank_pattern": {"o_proj": 2, "v_proj": 2}},
    ),
    "dense, one of a group": (DENSE, lambda: some(per_expert(DENSE), "v_proj", "gate_proj"), {}),
    "experts": (EXPERTS, lambda: some(per_expert(EXPERTS, 4), *TARGETS), {"rank": 4, "use_rslora": True}),
    "experts, alphas that differ": (
        EXPERTS,
        lambda: some(per_expert(EXPERTS), *TARGETS),
        {"alpha_pattern": {"up_proj": 3}},
    ),
    "experts, down alone": (EXPERTS, lambda: some(per_expert(EXPERTS, 8), "down_proj"), {"rank": 8}),
    "experts, fused": (EXPERTS, lambda: stacked(EXPERTS)[0], {"target_parameters": PARAMETERS}),
    "experts, shared factors": (EXPERTS, lambda: outer(EXPERTS), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_slot_computes_what_the_revision_does_and_nothing_of_the_one_before(
    case: str, arena: SharedArena, tmp_path: Path
) -> None:
    shape, tensors, about = CASES[case]
    revision = revision_of(tmp_path, shape, tensors(), **about)
    adapter = arena.put_bytes(revision, "ab" * 32, 1)
    pool = Pool(shape)
    written = ArenaReader(pool).write(str(extent_of(adapter)), SLOT)
    deltas = deltas_of(revision)
    for place, module in shape.places():
        if place.module in {"experts.gate_up", "router"}:
            continue
        found = pool.delta(place, written)
        expected = deltas.get(place, torch.zeros(())).expand_as(found)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda text, at=place: f"{at}: {text}")
        assert module.outputs == found.shape[-2]
    for buffers in (*pool.memory_pool.A_buffer.values(), *pool.memory_pool.B_buffer.values()):
        assert all((layer[other] == 9.0).all() for layer in buffers for other in range(SLOTS) if other != SLOT)


def put(arena: SharedArena, tmp_path: Path, shape: BaseShape, rank: int = 3) -> Any:
    packed = io.BytesIO()
    about = config(rank, target_modules=list(TARGETS))
    facts = pack_peft(folder_of(tmp_path / "a", some(per_expert(shape, rank), *TARGETS), about), shape, packed)
    return arena.put_bytes(packed.getvalue(), facts.digest, rank)


def test_an_extent_that_is_given_away_meanwhile_is_no_adapter(arena: SharedArena, tmp_path: Path) -> None:
    adapter = put(arena, tmp_path, DENSE)
    pool = Pool(DENSE)
    # between the header's check and the last one
    pool.device = GivesAway(arena, adapter)  # type: ignore[assignment]
    with pytest.raises(StaleExtent, match="was given away"):
        ArenaReader(pool).write(str(extent_of(adapter)), SLOT)


class GivesAway:
    def __init__(self, arena: SharedArena, adapter: Any) -> None:
        self._arena, self._adapter = arena, adapter

    @property
    def type(self) -> str:
        self._arena.give_away(self._adapter)
        return "cpu"


def test_what_the_model_has_no_place_for_is_refused(arena: SharedArena, tmp_path: Path) -> None:
    with pytest.raises(Unfit, match=r"can't change layers\.0\.experts"):
        ArenaReader(Pool(DENSE)).write(str(extent_of(put(arena, tmp_path, EXPERTS))), SLOT)
    with pytest.raises(Unfit, match="rank 9 is above this engine's 8"):
        ArenaReader(Pool(DENSE)).write(str(extent_of(put(arena, tmp_path / "b", DENSE, 9))), SLOT)


def test_a_factor_of_another_size_is_refused_not_repeated(arena: SharedArena, tmp_path: Path) -> None:
    adapter = put(arena, tmp_path, base("Qwen3", hidden_size=1, num_hidden_layers=1))
    with pytest.raises(ValueError, match="A has 1 where the model has 16"):
        ArenaReader(Pool(DENSE)).write(str(extent_of(adapter)), SLOT)


def test_workers_that_share_a_model_read_no_arena(arena: SharedArena, tmp_path: Path) -> None:
    pool = Pool(DENSE)
    pool.memory_pool.tp_size = 2
    with pytest.raises(OutOfReach, match="several workers"):
        ArenaReader(pool).write(str(extent_of(put(arena, tmp_path, DENSE))), SLOT)
