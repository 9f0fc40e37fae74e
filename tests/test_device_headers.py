"""csrc/rules and core/layout.h are one source for the CPU and the device: C11 (the build itself), C++17, and NVRTC."""

import ctypes
import importlib.util
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADERS = [*sorted(p.relative_to(ROOT / "csrc").as_posix() for p in ROOT.glob("csrc/rules/*.h")), "core/layout.h"]
REALS = {"float": [], "double": ["-DBWD_REAL_IS_DOUBLE"]}
ARITHMETIC = r"^\s+((?:fma|sqrt|div|rcp|mul|add|sub)\.\S*f(?:32|64))\s"

pytestmark = pytest.mark.skipif(not (ROOT / "csrc/rules").exists(), reason="the tests run without the source tree")

#: One kernel per rule, as short as one can be, and one per conversion.
KERNELS = """
#include "core/layout.h"
#include "rules/registry.h"

#define KERNEL(rule, states, hypers)                                                                           \\
    extern "C" __global__ void step_##rule(bwd_real *param, const bwd_real *grad, bwd_real *states_of,         \\
                                           bwd_##rule##_scalars scalars)                                       \\
    {                                                                                                          \\
        const int i = blockIdx.x * blockDim.x + threadIdx.x;                                                   \\
        bwd_##rule##_update(param + i, grad[i], states_of + BWD_MAX_STATES * i, &scalars);                     \\
    }
BWD_RULES(KERNEL)

#ifndef BWD_REAL_IS_DOUBLE
extern "C" __global__ void convert(bwd_f16 *half, bwd_bf16 *brain, bwd_f32 *single)
{
    bwd_real x[2];
    bwd_load2_bf16(brain, x);
    bwd_store2_f32(single, x);
    bwd_store2_bf16(brain, bwd_reals_f16(half, 2, x));
    bwd_pack_f16(half, 2, x);
}
#endif
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("real", REALS)
def test_header_is_cpp17_without_a_warning(header, real, tmp_path):
    source = tmp_path / "header.cpp"
    source.write_text(f'#include "{header}"\n#include "{header}"\n')
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Wshadow", "-pedantic", "-Werror", "-Icsrc"]
    done = subprocess.run(["g++", *flags, *REALS[real], source], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def nvrtc():
    """The compiler from its own package, or None."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else []:
        for library in pathlib.Path(folder).glob("cuda_nvrtc/lib/libnvrtc.so.12"):
            return ctypes.CDLL(str(library))
    return None


def text_of(library, program, what):
    """What nvrtcGet<what> gives."""
    size = ctypes.c_size_t()
    assert getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(library, f"nvrtcGet{what}")(program, text) == 0
    return text.value.decode()


@pytest.mark.skipif(not nvrtc(), reason="no NVRTC: pip install nvidia-cuda-nvrtc-cu12==12.9.86")
@pytest.mark.parametrize("real", REALS)
def test_headers_compile_under_nvrtc(real):
    """Without any standard header and without a word in the log; every rounding is the one that the CPU does."""
    library, program = nvrtc(), ctypes.c_void_p()
    assert library.nvrtcCreateProgram(ctypes.byref(program), KERNELS.encode(), b"kernels.cu", 0, None, None) == 0
    options = ["--std=c++17", "--fmad=false", "--gpu-architecture=compute_80", f"-I{ROOT / 'csrc'}", *REALS[real]]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        status = library.nvrtcCompileProgram(program, len(options), array)
        log = text_of(library, program, "ProgramLog")
        assert status == 0 and not log.strip(), log
        ptx = text_of(library, program, "PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    kernels = re.findall(r"\.visible \.entry (\w+)", ptx)
    assert len(kernels) == (5 if real == "float" else 4), kernels
    bits = "f32" if real == "float" else "f64"
    used = set(re.findall(ARITHMETIC, ptx, re.MULTILINE))
    # .rn rounds to nearest; without .ftz denormals live; nothing is computed in the other type
    assert {f"{o}.rn.{bits}" for o in ("fma", "sqrt", "div", "mul")} <= used, used
    assert all(re.fullmatch(rf"\w+\.(rn\.)?{bits}", operation) for operation in used), used
    assert "call" not in ptx and ".func" not in ptx
