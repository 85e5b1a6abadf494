"""Compiles Triton's driver module into a directory, on a machine without a GPU.

Triton compiles `driver.c` when a process first uses a GPU, and keeps it in its cache under a key made of the source and of
the places of the libraries. This makes the same module under the same key, linked against an empty stand-in for NVIDIA's
library. An image with that cache needs no compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main(cache: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache
    from triton.backends.nvidia import driver
    from triton.runtime import build

    with tempfile.TemporaryDirectory() as folder:
        stand_in = Path(folder) / "libcuda.so.1"
        subprocess.run(["gcc", "-shared", "-o", str(stand_in), "-x", "c", os.devnull], check=True)
        os.environ["LIBRARY_PATH"] = folder  # where gcc looks, too; it is no part of the key
        path = build.compile_so_from_file(
            src_path=str(Path(driver.__file__).parent / "driver.c"),
            name="cuda_utils",
            library_dirs=driver.library_dirs(),
            include_dirs=driver.include_dirs,
            libraries=driver.libraries,
        )
    print(path)


if __name__ == "__main__":
    main(sys.argv[1])
