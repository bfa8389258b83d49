"""Where the demo keeps what takes long to make. A changed recipe is another folder, so no stale adapter is served."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoPaths:
    """``root`` is the demo's cache folder."""

    root: Path

    @property
    def mesh(self) -> Path:
        """The state of the demo's mesh, made anew by every run."""
        return self.root / "mesh"

    @property
    def base(self) -> Path:
        return self.root / f"base-{_recipe('base.py')}"

    def adapter(self, name: str) -> Path:
        return self.root / f"{name}-{_recipe('base.py', 'styles.py', 'train.py')}"


def _recipe(*sources: str) -> str:
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / source).read_bytes() for source in sources)).hexdigest()[:10]
