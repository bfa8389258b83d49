"""The training service as recipes see it: the stock ``tinker`` SDK at a gateway's address."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import tinker
from tinker import types

from wire.outcomes import NotFound

from .config import Config
from .text import Text

_HUB_S = 10.0
_BETAS = {"beta1": 0.9, "beta2": 0.99}


def connect(url: str, key: str) -> tinker.ServiceClient:
    """A session at the gateway ``url``."""
    return tinker.ServiceClient(base_url=url, api_key=key)


async def begin(service: Any, config: Config) -> Any:
    """A training client with a new adapter, which is ``config.policy``."""
    return await service.create_lora_training_client(
        config.base, rank=config.rank, seed=config.seed, train_unembed=False, user_metadata={"policy": config.policy}
    )


async def resume(service: Any, config: Config, checkpoint: str) -> Any:
    """A training client as it was at ``checkpoint``, optimizer included."""
    metadata = {"policy": config.policy}
    return await service.create_training_client_from_state_with_optimizer(checkpoint, user_metadata=metadata)


def optimise(client: Any, learning_rate: float) -> Any:
    """A future of a step of AdamW with the gradients that are there."""
    return client.optim_step(types.AdamParams(learning_rate=learning_rate, **_BETAS))


async def text_of(service: Any, config: Config) -> Text:
    """With the tokenizer that the configuration names, else the one that the base goes by. Raises NotFound."""
    from transformers import AutoTokenizer

    name = config.tokenizer or config.base
    try:
        local = not await asyncio.to_thread(_may_be_fetched, name)
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise NotFound(f"tokenizer: {name} can't be loaded ({reason}): name its folder", field="tokenizer") from None
    told = await service.get_server_capabilities_async()
    context = next((each.max_context_length for each in told.supported_models if each.model_name == config.base), None)
    return Text(tokenizer, chat=config.chat, stop=config.stop, context=context or 0)


def _may_be_fetched(name: str) -> bool:
    """Whether there is such a model on the hub: one that is not heard would be asked again for minutes."""
    from huggingface_hub import model_info

    if Path(name).is_dir():
        return False
    try:
        model_info(name, timeout=_HUB_S)
    except Exception:  # whatever it fails with: nothing is fetched then
        return False
    return True
