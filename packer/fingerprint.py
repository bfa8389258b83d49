"""A base model's fingerprint: one digest over its config, its tokenizer and its weights.

A fine-tune of the same shape is another base, since its weights differ; so is the same base with another chat template.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from blake3 import blake3

from packer.copying import Progress
from packer.folder import read_bounded
from packer.shape import MAX_CONFIG_BYTES
from wire.outcomes import ArtifactUnavailable, InvalidRequest

CONFIG_NAME = "config.json"
WEIGHTS_SUFFIX = ".safetensors"
# what decides how text becomes tokens and messages become text
_TOKENIZER_NAMES = frozenset({
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "special_tokens_map.json",
    "spiece.model", "tekken.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
    "vocab.txt",
})  # fmt: skip
_CHUNK_BYTES = 8 << 20
_PERSONALITY = b"roost base fingerprint 1\n"


class Fingerprint(msgspec.Struct, frozen=True):
    """``value`` is lower-case hex blake3; ``config`` the bytes of config.json, which the value covers."""

    value: str
    config: bytes


def fingerprint(model_dir: Path, progress: Progress | None = None) -> Fingerprint:
    """Read a model's folder once, in bounded memory; ``progress`` gets (bytes read, bytes in all).

    The value covers the name and the blake3 digest of each file, in the order of the names. Raises InvalidRequest (no
    config.json or no safetensors weights) or ArtifactUnavailable (a file can't be read).
    """
    files = _covered(model_dir)
    config = read_bounded(model_dir / CONFIG_NAME, MAX_CONFIG_BYTES)
    total = sum(path.stat().st_size for path in files)
    done = 0
    covered = blake3(_PERSONALITY)
    for path in files:
        digest = blake3(max_threads=blake3.AUTO)
        # the config that is returned is the one that was hashed, whatever happens to the file meanwhile
        for chunk in (memoryview(config),) if path.name == CONFIG_NAME else _chunks(path):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
        covered.update(f"{path.name}\0{digest.hexdigest()}\n".encode())
    return Fingerprint(covered.hexdigest(), config)


def _covered(model_dir: Path) -> list[Path]:
    try:
        files = sorted(path for path in model_dir.iterdir() if _is_covered(path.name) and path.is_file())
    except OSError as error:
        raise InvalidRequest(f"{model_dir} is not a readable folder: {error.strerror}", field="path") from None
    names = [path.name for path in files]
    if CONFIG_NAME not in names:
        raise InvalidRequest(f"{model_dir} has no {CONFIG_NAME}: not a model's folder", field="path")
    if not any(name.endswith(WEIGHTS_SUFFIX) for name in names):
        raise InvalidRequest(f"{model_dir} has no {WEIGHTS_SUFFIX} weights; other formats are not served", field="path")
    return files


def _is_covered(name: str) -> bool:
    return (
        name == CONFIG_NAME
        or name in _TOKENIZER_NAMES
        or name.endswith((WEIGHTS_SUFFIX, f"{WEIGHTS_SUFFIX}.index.json"))
    )


def _chunks(path: Path) -> Iterable[memoryview]:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                yield buffer[:size]
    except OSError as error:
        raise ArtifactUnavailable(f"cannot read {path}: {error.strerror}") from error
