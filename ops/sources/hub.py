"""An adapter from a model hub, through the hub's own client. HF_ENDPOINT and HF_TOKEN are the client's to read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from wire.outcomes import ArtifactUnavailable, Forbidden, InvalidRequest, NotFound, RoostError, TooLarge

from .source import FILES, Bars

_NAME_RE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?")
# of the HTTP library that the client uses, which is not the same in all its versions
_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
_COMMIT_RE = re.compile(r"[0-9a-f]{40}")


class _Wanted(NamedTuple):
    """A file as the hub announced it. ``size`` in bytes."""

    name: str
    size: int


def fetch_from_hub(named: str, folder: Path, bars: Bars) -> str:
    """Fetch ``ORGANISATION/NAME[@REVISION]`` into ``folder``; the commit that it came from.

    Both files are of one commit, however the branch moves meanwhile. Raises InvalidRequest, NotFound, Forbidden,
    TooLarge, ArtifactUnavailable.
    """
    found = _NAME_RE.fullmatch(named)
    if found is None:
        raise InvalidRequest(f"hf:{named}: expected hf:ORGANISATION/NAME, with @REVISION if need be", field="source")
    repo, revision = found[1], found[2]
    try:
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        commit, files = _announced(api, repo, revision, folder)
        for wanted in files:
            with bars(f"Fetching {wanted.name}") as progress:
                api.hf_hub_download(
                    repo, wanted.name, revision=commit, local_dir=folder, tqdm_class=_bar(wanted, progress)
                )
    except RoostError:
        # some of ours are OSErrors too
        raise
    except (HfHubHTTPError, HFValidationError, EntryNotFoundError, OSError, _HTTP_ERROR) as error:
        raise _translated(error, repo) from None
    return f"hf:{repo}@{commit}"


def _announced(api: HfApi, repo: str, revision: str | None, folder: Path) -> tuple[str, list[_Wanted]]:
    """The commit that ``revision`` means now, and its two files, of allowed sizes. Nothing is fetched yet."""
    commit = revision
    files = []
    for name, most in FILES.items():
        told = api.hf_hub_download(repo, name, revision=commit, local_dir=folder, dry_run=True)
        if _COMMIT_RE.fullmatch(told.commit_hash) is None or told.file_size is None:
            raise ArtifactUnavailable(f"the hub does not say which commit of {repo} it means, or how large {name} is")
        if told.file_size > most:
            raise TooLarge(f"{name} of {repo} has {told.file_size} bytes; at most {most}", field="source")
        commit = told.commit_hash
        files.append(_Wanted(name, told.file_size))
    assert commit is not None
    return commit, files


def _bar(wanted: _Wanted, progress: Callable[[int, int], None]) -> type[Any]:
    """What the client thinks is its progress bar: ours, and the guard of the size that was announced."""

    class Bar(tqdm):
        done = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.done += int(n or 0)
            if self.done > wanted.size:
                raise TooLarge(f"{wanted.name} is larger than the hub said", field="source")
            progress(self.done, wanted.size)

    return Bar


def _translated(error: Exception, repo: str) -> RoostError:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if isinstance(error, GatedRepoError) or status == 403:
        return Forbidden(f"the hub does not let us read {repo}: ask for access, and set HF_TOKEN", field="source")
    if isinstance(error, RevisionNotFoundError):
        return NotFound(f"the hub has no such revision of {repo}", field="source")
    if isinstance(error, RepositoryNotFoundError):
        return NotFound(f"the hub has no {repo}, or shows it only to those with another HF_TOKEN", field="source")
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return NotFound(
            f"{repo} lacks one of {', '.join(FILES)}: pickled weights are not read, save it as safetensors",
            field="source",
        )
    if isinstance(error, HFValidationError):
        return InvalidRequest(f"hf:{repo} is no name of the hub's", field="source")
    answered = f"it answered {status}" if status else "it can't be reached, or broke off"
    return ArtifactUnavailable(f"can't fetch {repo} from the hub: {answered}")
