"""Compiles the table of Triton kernels for one kind of GPU, without one, and prints what the compiler did as JSON.

python compile_kernels.py 90
"""

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tureen.kernels.triton.variants import variants

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compile_one(name, capability):
    """Compiles a variant; returns registers, stack and shared memory, and the names of its instructions."""
    (variant,) = (each for each in variants() if each.name == name)
    names = variant.kernel.arg_names
    constants = {key: value for key, value in variant.options.items() if key in names}
    options = {key: value for key, value in variant.options.items() if key not in names}
    given = iter([each.partition(" ")[0] for each in variant.arguments])
    signature = {name: "constexpr" if name in constants else next(given) for name in names}
    assert not list(given), "more types than arguments"
    arguments = enumerate(variant.arguments)  # constants come after them
    aligned = {(place,): [["tt.divisibility", 16]] for place, each in arguments if each[0] == "*" or "%" in each}
    source = ASTSource(variant.kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([CUOBJDUMP, what, file.name], check=True, capture_output=True, text=True).stdout
            for what in ("-res-usage", "-sass")
        )
    facts = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    instructions = sorted(set(re.findall(r"^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", code, re.MULTILINE)))
    return facts | {"shared": compiled.metadata.shared, "instructions": instructions}


def main():
    capability = int(sys.argv[1])
    names = [variant.name for variant in variants()]
    with ProcessPoolExecutor(2) as pool:
        results = pool.map(compile_one, names, [capability] * len(names))
        print(json.dumps(dict(zip(names, results, strict=True))))


if __name__ == "__main__":
    main()
