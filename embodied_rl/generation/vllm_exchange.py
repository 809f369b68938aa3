"""How new weights reach vLLM's workers, in this process or in others."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from embodied_rl.errors import UserError
from embodied_rl.policies.model_folder import first_line

_BUCKET_BYTES = 2**30


def load_in_place(call: Callable[[], object]) -> None:
    """Raises UserError, in one line, when the engine refuses a tensor."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        call()
    except EngineDeadError:
        raise
    except Exception as error:  # an engine in another process reports whatever happened there as a bare Exception
        raise UserError(f"vLLM cannot take the new weights; those it serves may be half replaced: {first_line(error)}") from error


def load_files(tensors: Iterable[tuple[str, Any]], call: Callable[[str], object]) -> None:
    """Call `call` with the path of one file of tensors after another. Raises as `load_in_place` does."""
    with _Exchange() as exchange:
        for path in exchange.files(tensors):
            load_in_place(partial(call, str(path)))


class _Exchange:
    """A folder in shared memory, where there is one, through which tensors reach vLLM's workers."""

    def __enter__(self) -> _Exchange:
        shared = Path("/dev/shm")
        self._folder = Path(tempfile.mkdtemp(prefix="embodied_weights_", dir=shared if os.access(shared, os.W_OK) else None))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def files(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[Path]:
        """A file of about a gibibyte at a time; each is gone when the next one is asked for."""
        bucket: dict[str, Any] = {}
        size = 0
        for name, tensor in tensors:
            whole = tensor.detach().contiguous().cpu()
            bucket[name] = whole
            size += whole.numel() * whole.element_size()
            if size >= _BUCKET_BYTES:
                yield from self._written(bucket)
                bucket, size = {}, 0
        if bucket:
            yield from self._written(bucket)

    def _written(self, bucket: dict[str, Any]) -> Iterator[Path]:
        path = self._folder / "weights.safetensors"
        save_file(bucket, path)
        yield path
        path.unlink()
