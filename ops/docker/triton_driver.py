"""Compiles Triton's driver module into a directory, on a machine without a GPU.

Triton compiles `driver.c` when a process first uses a GPU, and keeps it in its cache under a key made of the source and of
the platform. This lets Triton make the same module under the same key, linked against an empty stand-in for NVIDIA's
library. An image with that cache needs no compiler. The module is not loaded: that would need NVIDIA's own library.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn


class Compiled(Exception):
    """The module lies at the path that is the message."""


def stop_before_loading(name: str, path: str) -> NoReturn:
    raise Compiled(path)


def main(cache: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache
    from triton.backends.nvidia import driver
    from triton.runtime import build

    build._load_module_from_path = stop_before_loading
    with tempfile.TemporaryDirectory() as folder:
        stand_in = Path(folder) / "libcuda.so.1"
        subprocess.run(["gcc", "-shared", "-o", str(stand_in), "-x", "c", os.devnull], check=True)
        os.environ["LIBRARY_PATH"] = folder  # where gcc looks, too
        try:
            driver.CudaUtils()
        except Compiled as module:
            print(module)


if __name__ == "__main__":
    main(sys.argv[1])
