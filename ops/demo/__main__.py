"""``make demo``: trains policies, serves them on a real engine, and checks every answer.

The environment's ENGINE says on which: vllm (the default) or sglang.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from openai import OpenAI, OpenAIError
from rich.rule import Rule

from backends.process import free_port
from backends.sglang.command import PYTHON_VARIABLE
from ops.cli.client import ApiClient, policy_path
from ops.cli.output import ERR, OUT
from ops.config import ENVIRONMENT_PREFIX
from ops.layout import Layout
from packer.revision import RevisionFile
from packer.unpack import write_peft

from .ask import Answer, Unexpected, ask
from .paths import DemoPaths
from .styles import BASE, QUESTION, RANK, STYLES, TENANT

SECOND_REVISION = "pirate-polite"
POLICIES = [name for name in STYLES if name != SECOND_REVISION]
CACHE = Path(".cache/demo")
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}


class Demo:
    """One run, on a state folder of its own."""

    def __init__(self, cache: DemoPaths, engine: str) -> None:
        self._cache = cache
        self._engine = engine
        self._layout = Layout.of(str(cache.mesh))
        self._url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
        self._environment = without_settings(os.environ) | {
            "ROOST_STATE_DIR": str(self._layout.root),
            "ROOST_TRAINING__TENANT": TENANT,
        }
        self._trains = any(not cache.adapter(name).is_dir() for name in STYLES)

    def run(self) -> None:
        """Raises Unexpected, or CalledProcessError of a command that failed."""
        heading("1. A small base model")
        self._python("ops.demo.base", str(self._cache.base))
        OUT.print(f"  in {self._cache.base}")

        trainer = ", a trainer" if self._trains else ""
        heading(f"2. The mesh: registrar, sidecar, an engine ({ENGINES[self._engine]}), gateway{trainer}")
        base = f"{BASE}={self._cache.base}"
        port = self._url.rpartition(":")[2]
        self._roost(
            "up", "--detach", "--base", base, "--backend", self._engine, "--max-rank", str(RANK),
            "--max-model-len", "1024", "--port", port, *(("--train", BASE) if self._trains else ()),
        )  # fmt: skip

        heading("3. Three policies over it, trained at once" if self._trains else "3. Three policies over it")
        self._make(*POLICIES)
        self._roost("policy", "list")

        heading("4. The same question to all of them, through the OpenAI SDK")
        client = OpenAI(base_url=f"{self._url}/v1", api_key=self._layout.admin_key.read_text().strip())
        OUT.print(f"  {QUESTION}\n", style="italic")
        ask(client, BASE, QUESTION, kind="base", served=BASE)
        first = {name: self._ask(client, name, kind=name, revision=1) for name in POLICIES}

        heading("5. A second revision: served from the next request on")
        self._make(SECOND_REVISION)
        self._ask(client, "pirate", kind=SECOND_REVISION, revision=2)
        self._ask(client, "pirate@1", kind="pirate", revision=1)

        heading("6. Rolled back: the first one again, word for word")
        self._roost("policy", "rollback", f"{TENANT}/pirate")
        again = self._ask(client, "pirate", kind="pirate", revision=1)
        if again.text != first["pirate"].text:
            raise Unexpected(f"after the rollback: expected {first['pirate'].text!r}, got {again.text!r}")

        heading("7. Where every revision's bytes are")
        for name in POLICIES:
            self._roost("policy", "where", f"{TENANT}/{name}")
        self._roost("status")

    def clean(self) -> None:
        """End what an earlier run left, and start from an empty catalog."""
        if self._layout.run.is_dir():
            self._python("ops.cli", "down", quiet=True)
        shutil.rmtree(self._layout.root, ignore_errors=True)

    def stop(self) -> None:
        heading("8. Stopped, in order")
        self._roost("down")

    def _ask(self, client: OpenAI, name: str, *, kind: str, revision: int) -> Answer:
        policy = f"{TENANT}/{name.partition('@')[0]}"
        return ask(client, f"{TENANT}/{name}", QUESTION, kind=kind, served=f"{policy}@{revision}")

    def _make(self, *names: str) -> None:
        """A new revision in each of these styles: trained, or as an earlier run trained it."""
        missing = [name for name in names if not self._cache.adapter(name).is_dir()]
        for name in names:
            if name not in missing:
                policy = f"{TENANT}/{STYLES[name].policy}"
                self._roost("publish", policy, str(self._cache.adapter(name)), "--create-over", BASE)
        if missing:
            key = {"ROOST_API_KEY": self._layout.admin_key.read_text().strip()}
            self._python("ops.demo.train", str(self._cache.root), self._url, *missing, environment=key)
            for name in missing:
                self._keep(name)

    def _keep(self, name: str) -> None:
        """Unpack the latest revision of the style's policy into the cache."""
        client = ApiClient(self._url, self._layout.admin_key.read_text().strip())
        revision = client.call("GET", policy_path(f"{TENANT}/{STYLES[name].policy}"))["revisions"][-1]
        (file,) = (path for path in self._layout.store.rglob(f"{revision['digest']}*") if path.is_file())
        folder = self._cache.adapter(name)
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        write_peft(RevisionFile.open(file).buffer, part, base_model=BASE)
        part.rename(folder)

    def _roost(self, *arguments: str) -> None:
        OUT.print(f"$ roost {shlex.join(arguments)}", style="dim", markup=False, soft_wrap=True)
        self._python("ops.cli", *arguments)

    def _python(
        self, module: str, *arguments: str, quiet: bool = False, environment: Mapping[str, str] | None = None
    ) -> None:
        output = subprocess.DEVNULL if quiet else None
        given = self._environment | dict(environment or {})
        subprocess.run([sys.executable, "-m", module, *arguments], env=given, stdout=output, check=True)


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without what would set up the mesh in another way; where SGLang is installed is no such thing."""
    return {
        name: value
        for name, value in environment.items()
        if name == PYTHON_VARIABLE or not name.startswith(ENVIRONMENT_PREFIX)
    }


def heading(text: str) -> None:
    OUT.print()
    OUT.print(Rule(text, align="left", style="green"))


def tell_next_steps(cache: DemoPaths, engine: str) -> None:
    """The same by hand, with the models that are there now."""
    OUT.print("Try it yourself:")
    for command in (
        f"roost up --detach --base {BASE}={cache.base} --backend {engine} --max-model-len 2048",
        f"roost publish me/pirate {cache.adapter('pirate')} --create-over {BASE}",
        "roost chat me/pirate",
        "roost down",
    ):
        OUT.print(f"  .venv/bin/{command}", markup=False, soft_wrap=True)


def main() -> int:
    """0 when every answer was the expected one, 1 otherwise, 2 for an unknown engine, 130 after Ctrl-C."""
    started = time.monotonic()
    engine = os.environ.get("ENGINE") or "vllm"
    if engine not in ENGINES:
        ERR.print(f"ENGINE is {engine!r}: it can be {' or '.join(ENGINES)}", style="bold red", markup=False)
        return 2
    demo = Demo(DemoPaths(CACHE), engine)
    code = 1
    try:
        demo.clean()
        try:
            demo.run()
        finally:
            demo.stop()
        code = 0
    except (Unexpected, OpenAIError) as error:
        ERR.print(f"\nThe demo failed: {error}", style="bold red", markup=False)
    except subprocess.CalledProcessError as error:
        # the command has told its own error already
        ERR.print(f"\nThe demo failed: {shlex.join(error.cmd[1:])} ended with {error.returncode}", style="bold red")
    except KeyboardInterrupt:
        code = 130
    if code == 0:
        OUT.print(f"\nEverything answered as it should, in {time.monotonic() - started:.0f} s.", style="bold green")
        tell_next_steps(DemoPaths(CACHE), engine)
    return code


if __name__ == "__main__":
    sys.exit(main())
