"""Compile bertkit's C code when a wheel or an editable installation is built.

Without a C compiler, and on other processors than x86-64, bertkit is installed without it; torch's
operators then do the same work (`bertkit.model.native`). CC names the compiler.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("bertkit") / "model" / "native.c"
INSTRUCTIONS = {
    "avx512": [f"-mavx512{name}" for name in ("f", "bw", "dq", "vl", "vnni", "bf16")],
    "avx2": ["-mavx2", "-mfma"],
}
FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-fno-strict-aliasing")
LINKED = ("-lm", "-ldl")


class CompileNative(BuildHookInterface):
    """Build the libraries next to their source, and mark the wheel as one for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, or say why not."""
        if sys.platform != "linux" or platform.machine() != "x86_64":
            return
        compiler = shlex.split(os.environ.get("CC", "cc"))
        source = hashlib.sha256((Path(self.root) / SOURCE).read_bytes()).hexdigest()
        for name, instructions in INSTRUCTIONS.items():
            library = SOURCE.with_name(f"libbertkit-{name}.so")
            flags = [*FLAGS, *instructions, f'-DSOURCE_HASH="{source}"']
            command = [*compiler, *flags, str(SOURCE), *LINKED, "-o", str(library)]
            try:
                subprocess.run(command, cwd=self.root, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                self.app.display_warning(f"bertkit is built without its C code: {error}")
                return
            build_data["artifacts"].append(f"/{library}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_')}"
