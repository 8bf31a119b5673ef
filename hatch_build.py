"""Compile bertkit's C code when a wheel or an editable installation is built, on Linux.

Without a C compiler bertkit is installed without it; Python and torch's operators then do the same
work (`bertkit.tokenizer.wordpiece`, `bertkit.model.native`). CC names the compiler.
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

WORDPIECE = Path("bertkit") / "tokenizer" / "wordpiece.c"
LAYERS = Path("bertkit") / "model" / "native" / "native.c"
LIBRARIES: dict[str, tuple[Path, list[str]]] = {
    "wordpiece": (WORDPIECE, []),
    "avx512": (LAYERS, [f"-mavx512{name}" for name in ("f", "bw", "dq", "vl", "vnni", "bf16")]),
    "avx2": (LAYERS, ["-mavx2", "-mfma"]),
}
"""Library -> its source and the instructions that it needs; on x86-64 only if there are some."""
FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-fno-strict-aliasing")
LINKED = ("-lm", "-ldl")


class CompileNative(BuildHookInterface):
    """Build the libraries next to their source, and mark the wheel as one for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, or say why not."""
        if sys.platform != "linux" or sys.byteorder != "little":  # wordpiece.c reads bytes by eight
            return
        compiler, built = shlex.split(os.environ.get("CC", "cc")), []
        for name, (source, instructions) in LIBRARIES.items():
            if instructions and platform.machine() != "x86_64":
                continue
            made_from = hashlib.sha256((Path(self.root) / source).read_bytes()).hexdigest()
            library = source.with_name(f"libbertkit-{name}.so")
            flags = [*FLAGS, *instructions, f'-DSOURCE_HASH="{made_from}"']
            command = [*compiler, *flags, str(source), *LINKED, "-o", str(library)]
            try:
                subprocess.run(command, cwd=self.root, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                self.app.display_warning(f"bertkit is built without {library.name}: {error}")
                continue
            built.append(f"/{library}")
        if built:
            build_data["artifacts"] += built
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_')}"
