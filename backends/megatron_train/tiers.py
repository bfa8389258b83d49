"""Where policies lie: on the device, in host memory, on disk. The one that is worked on is on the device.

Least recently used ones move down when a byte budget is reached. A move copies one buffer, whatever the policy holds.
"""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from typing import Any

import torch

from wire.outcomes import NotFound, StorageFull
from wire.trainer import PolicyMemory

from .policy import Policy


class Tiers:
    """The policies of this rank, in the order of their last use.

    ``device_bytes`` and ``host_bytes`` bound what lies there, 0 meaning no bound; the policy in use always lies on the
    device. ``scratch`` is a folder of this rank's own, for the files of those on disk.
    """

    def __init__(self, device: torch.device, *, device_bytes: int, host_bytes: int, scratch: Path) -> None:
        self._device = device
        self._device_bytes = device_bytes
        self._host_bytes = host_bytes
        self._scratch = scratch
        self._policies: dict[str, Policy] = {}
        self._where: dict[str, str] = {}
        self._files = 0
        self._paths: dict[str, Path] = {}

    def add(self, policy: Policy) -> None:
        """Take a policy whose buffer is on the device."""
        name = policy.spec.policy
        self._policies[name] = policy
        self._where[name] = "device"
        self._make_room(name)

    def use(self, name: str) -> Policy:
        """The policy, on the device, as the most recently used. Raises NotFound."""
        policy = self._policies.pop(name, None)
        if policy is None:
            raise NotFound(f"the trainer has no policy {name}", field="policy")
        self._policies[name] = policy
        if self._where[name] != "device":
            self._raise_to_device(name, policy)
            self._make_room(name)
        return policy

    def remove(self, name: str) -> None:
        if self._policies.pop(name, None) is not None:
            self._where.pop(name)
            self._forget_file(name)

    def memory(self) -> dict[str, PolicyMemory]:
        return {name: PolicyMemory(**{self._where[name]: policy.nbytes}) for name, policy in self._policies.items()}

    def _make_room(self, in_use: str) -> None:
        """Move down what is too much, least recently used first."""
        for upper, bound in (("device", self._device_bytes), ("host", self._host_bytes)):
            here = [name for name in self._policies if self._where[name] == upper]
            excess = sum(self._policies[name].nbytes for name in here) - bound if bound else 0
            for name in here:
                if excess <= 0:
                    break
                if name != in_use:
                    excess -= self._policies[name].nbytes
                    self._lower(name, self._policies[name])

    def _lower(self, name: str, policy: Policy) -> None:
        """From the device to the host, or from the host to disk. On a CPU the device is the host's memory already."""
        if self._where[name] == "device" and self._device.type != "cpu":
            host = _pinned(policy.buffer.shape)
            host.copy_(policy.buffer)
            policy.place_buffer(host)
            self._where[name] = "host"
            return
        try:
            policy.buffer.numpy().tofile(self._path(name))
        except OSError as error:
            raise StorageFull(f"no room on disk for cold policies: {error.strerror or error}") from error
        policy.place_buffer(None)
        self._where[name] = "disk"

    def _raise_to_device(self, name: str, policy: Policy) -> None:
        shape = (4, policy.layout.size)
        buffer = torch.empty(shape, dtype=torch.float32, device=self._device)
        if self._where[name] == "disk":
            stored = torch.from_file(str(self._path(name)), shared=False, size=buffer.numel(), dtype=torch.float32)
            buffer.copy_(stored.view(shape))
            self._forget_file(name)
        else:
            buffer.copy_(policy.buffer)
        policy.place_buffer(buffer)
        self._where[name] = "device"

    def _path(self, name: str) -> Path:
        if name not in self._paths:
            self._files += 1
            self._paths[name] = self._scratch / f"policy-{self._files}.bin"
        return self._paths[name]

    def _forget_file(self, name: str) -> None:
        path = self._paths.pop(name, None)
        if path is not None:
            path.unlink(missing_ok=True)


def _pinned(shape: torch.Size) -> torch.Tensor:
    """Host memory of this very size, pinned where the driver allows it: torch's pool rounds up to powers of 2."""
    tensor = torch.empty(shape, dtype=torch.float32)
    cuda: Any = torch.cuda
    if int(cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0:
        weakref.finalize(tensor, _unpin, tensor.untyped_storage()).atexit = False
    return tensor


def _unpin(storage: torch.UntypedStorage) -> None:
    cuda: Any = torch.cuda
    with contextlib.suppress(RuntimeError):
        cuda.cudart().cudaHostUnregister(storage.data_ptr())
