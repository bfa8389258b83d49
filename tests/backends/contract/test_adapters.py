"""What every engine backend promises of adapters, on the real engines."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
import pytest
import torch

from backends.interface import Installable, InstallFailed, InstallRefused, Removal
from tests.backends.support import Caller, from_bytes

from .stage import BASE, MAX_RANK, SLOTS, Contract

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

# longer than a block of any engine's prefix cache
LONG = "the fleet is asked the same question again and again, and each policy has an answer of its own: " * 2
# what engines compute otherwise, or not at all, unless somebody sees to it
FORMS: dict[str, dict[str, Any]] = {
    "rank 1": {"rank": 1, "alpha": 7},
    "rsLoRA": {"rank": 8, "alpha": 3, "rslora": True},
    "other ranks and alphas": {
        "rank": 4, "alpha": 8, "rank_pattern": {"q_proj": 2, "down_proj": 7}, "alpha_pattern": {"k_proj": 3},
    },
    "v and down alone": {"rank": 4, "alpha": 8, "targets": ("v_proj", "down_proj")},
    "q alone": {"rank": 8, "alpha": 5, "targets": ("q_proj",)},
    "up alone": {"rank": 8, "alpha": 5, "targets": ("up_proj",)},
    "bf16": {"rank": 4, "alpha": 8, "dtype": torch.bfloat16},
}  # fmt: skip


async def test_limits_are_those_that_were_asked_for(stage: Contract) -> None:
    limits = await stage.backend.limits()
    assert (limits.slots, limits.max_rank, limits.served_base) == (SLOTS, MAX_RANK, BASE)
    assert {"q", "k", "v", "o", "gate", "up", "down"} <= set(limits.targets)
    assert limits.serves_base


async def test_nobody_gets_in_without_the_token(stage: Contract) -> None:
    host, port = stage.backend.address()
    body = {"model": BASE, "prompt": "x", "max_tokens": 1, "lora_name": "x", "lora_path": "/x", "text": "x"}
    routes = ("/v1/completions", "/v1/load_lora_adapter", "/load_lora_adapter", "/generate", "/flush_cache")
    async with aiohttp.ClientSession(f"http://{host}:{port}") as stranger:
        for path in routes:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                async with stranger.post(path, json=body, headers=headers) as answer:
                    assert answer.status in {401, 403}, path
        async with stranger.get("/v1/models") as answer:
            assert answer.status in {401, 403}
    token = stage.backend.token().encode()
    assert token
    assert [file for file in stage.told() if token in file.read_bytes()] == []


async def test_an_installed_adapter_answers_what_peft_answers(stage: Contract, caller: Caller) -> None:
    first, second = await stage.install(1), await stage.install(2)
    assert await stage.backend.installed() == {first, second}
    models = (BASE, first, second)
    expected = [(200, stage.reference(seed)) for seed in (None, 1, 2)]
    assert len(set(expected)) == 3
    assert [await caller.complete(model) for model in models] == expected
    assert await asyncio.gather(*(caller.complete(model) for model in models)) == expected


@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_an_adapter_answers_what_peft_answers(stage: Contract, caller: Caller, form: str) -> None:
    seed = 100 + list(FORMS).index(form)
    adapter = await stage.install(seed, **FORMS[form])
    assert stage.reference(seed) != stage.reference(None)
    assert await caller.complete(adapter) == (200, stage.reference(seed))


async def test_installing_twice_is_installing_once(stage: Contract, caller: Caller) -> None:
    adapter = await stage.install(1)
    assert await stage.install(1) == adapter
    assert await stage.backend.installed() == {adapter}
    assert await caller.complete(adapter) == (200, stage.reference(1))


async def test_slots_are_used_over_and_over(stage: Contract, caller: Caller) -> None:
    really = (await stage.backend.limits()).removes_for_real
    former = ""
    for seed in range(10, 10 + 3 * SLOTS):
        adapter = await stage.install(seed)
        assert await caller.complete(adapter) == (200, stage.reference(seed))
        assert await stage.backend.remove(adapter, 10) in {Removal.REMOVED, Removal.FORGOTTEN}
        assert adapter not in await stage.backend.installed()
        status, text = await caller.complete(adapter)
        # an engine that can't forget may still answer, but for nobody else
        assert status != 200 if really else (status != 200 or text == stage.reference(seed))
        assert await stage.backend.remove(former or "acme@" + "0" * 64, 10) is Removal.ABSENT
        former = adapter
    assert await stage.backend.installed() == frozenset()


async def test_an_adapter_comes_back_to_a_slot_that_another_had(stage: Contract, caller: Caller) -> None:
    for seed in (1, 2, 1, 3, 1):
        adapter = await stage.install(seed)
        assert await caller.complete(adapter) == (200, stage.reference(seed))
        await stage.backend.remove(adapter, 10)


async def test_a_full_engine_evicts_nobody(stage: Contract, caller: Caller) -> None:
    adapters = [await stage.install(seed) for seed in (1, 2)]
    with pytest.raises(InstallFailed):
        await stage.install(3)
    assert await stage.backend.installed() == set(adapters)
    assert [await caller.complete(model) for model in adapters] == [(200, stage.reference(seed)) for seed in (1, 2)]


async def test_too_large_a_rank_is_refused(stage: Contract, caller: Caller) -> None:
    with pytest.raises(InstallRefused, match=f"rank {MAX_RANK + 1}"):
        await stage.install(50, rank=MAX_RANK + 1)
    assert await stage.backend.installed() == frozenset()
    await stage.check(caller)


BROKEN = ("no revision", "cut short", "a layer too many", "wider", "narrower")


def _broken(stage: Contract, how: str) -> Installable:
    if how == "no revision":
        return from_bytes(b"not a revision", "0" * 64, 4)
    if how == "cut short":
        whole = stage.put(1)
        return stage.arena.put_bytes(bytes(whole.view())[:-64], "1" * 64, whole.rank)
    config = {
        "a layer too many": {"num_hidden_layers": 3}, "wider": {"intermediate_size": 256}, "narrower": {"head_dim": 16},
    }[how]  # fmt: skip
    return stage.put_of_another_base(how.replace(" ", "-"), **config)


@pytest.mark.parametrize("how", BROKEN)
async def test_a_bad_adapter_is_refused_and_harms_nobody(stage: Contract, caller: Caller, how: str) -> None:
    """Also at its first request, which is when some engines find out."""
    broken = _broken(stage, how)
    for _ in range(2):
        with pytest.raises(InstallRefused):
            await stage.backend.install(broken, 60)
    assert await stage.backend.installed() == frozenset()
    await stage.check(caller)


async def test_an_adapter_with_no_number_in_it_harms_nobody_else(stage: Contract, caller: Caller) -> None:
    """None is ever published; one that comes all the same is refused, or wrong for itself alone."""
    broken, first = stage.put_not_finite(3), await stage.install(1)
    with contextlib.suppress(InstallRefused):
        await stage.backend.install(broken, 60)
        asked = [caller.complete(model) for model in (BASE, broken.adapter, first)]
        base, _, adapter = await asyncio.gather(*asked)
        assert [base, adapter] == [(200, stage.reference(None)), (200, stage.reference(1))]
    await stage.check(caller)


async def test_a_strangers_name_is_no_adapter(stage: Contract, caller: Caller) -> None:
    """The gateway asks for nothing else than what it leased: such a request must never pass for one of the base."""
    await stage.install(1)
    status, text = await caller.complete("acme@" + "2" * 64)
    assert status in {400, 404}, text
    assert await caller.complete(BASE) == (200, stage.reference(None))


async def test_an_adapter_in_use_is_answered_to_its_end(stage: Contract, caller: Caller) -> None:
    adapter = await stage.install(1)
    started = asyncio.Event()
    stream = asyncio.create_task(caller.stream(adapter, 200, started))
    await started.wait()
    removal = await stage.backend.remove(adapter, 30)
    if (await stage.backend.limits()).removes_for_real:
        assert removal is Removal.BUSY
        assert adapter in await stage.backend.installed()
    other = await stage.install(2)
    assert await caller.complete(other) == (200, stage.reference(2))
    assert await stream == stage.reference(1, max_tokens=200)


async def test_the_prefix_cache_is_kept_apart(stage: Contract, caller: Caller) -> None:
    """By revision and by tenant, and an adapter that comes back finds nothing of another's."""
    first = await stage.install(1)
    same_elsewhere = await stage.install(1, tenant="umbrella")
    models = {BASE: None, first: 1, same_elsewhere: 1}
    for model, seed in models.items():
        assert await caller.cached_tokens(model, LONG) == 0, model
        assert await caller.cached_tokens(model, LONG) > 0, model
        assert await caller.complete(model, prompt=LONG) == (200, stage.reference(seed, LONG))
    for adapter in (first, same_elsewhere):
        await stage.backend.remove(adapter, 10)
    other = await stage.install(2)
    assert await caller.cached_tokens(other, LONG) == 0
    assert await caller.complete(other, prompt=LONG) == (200, stage.reference(2, LONG))
    again = await stage.install(1)
    assert await caller.complete(again, prompt=LONG) == (200, stage.reference(1, LONG))


async def test_installs_beside_requests_disturb_nobody(stage: Contract, caller: Caller) -> None:
    adapter = await stage.install(1)
    expected = {BASE: stage.reference(None), adapter: stage.reference(1)}
    stop = asyncio.Event()

    async def ask(model: str) -> int:
        asked = 0
        while not stop.is_set():
            assert await caller.complete(model) == (200, expected[model])
            asked += 1
        return asked

    askers = [asyncio.create_task(ask(model)) for model in expected]
    for seed in range(60, 66):
        other = await stage.install(seed)
        assert await caller.complete(other) == (200, stage.reference(seed))
        await stage.backend.remove(other, 10)
    stop.set()
    assert min(await asyncio.gather(*askers)) > 0
