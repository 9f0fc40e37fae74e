"""Builds bwdfuse._C: one small static library per instruction set, and the extension that links them.

Environment, read here and nowhere else:
  BWDFUSE_DEBUG=1                        no optimisation, debug information, assertions
  BWDFUSE_SANITIZE=address,undefined     instrument everything (run with the sanitizer's runtime preloaded)
  BWDFUSE_WERROR=1                       warnings are errors
"""

import os
import platform
import sysconfig
from glob import glob

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("BWDFUSE_DEBUG", "") not in ("", "0")
SANITIZE = os.environ.get("BWDFUSE_SANITIZE", "")
WERROR = os.environ.get("BWDFUSE_WERROR", "") not in ("", "0")
X86 = platform.machine().lower() in ("x86_64", "amd64")

# Bits are an interface: nothing is contracted, nothing is reassociated. Dropping errno and traps changes no value; it
# is what lets the compiler vectorise a square root and a select.
FLAGS = [
    "-std=c11",
    *(["-O0", "-g3", "-UNDEBUG"] if DEBUG else ["-O3", "-DNDEBUG"]),
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    *["-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wvla"],
    *(["-Werror"] if WERROR else []),
    *([f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"] if SANITIZE else []),
]
# The tuning changes no bit. Without it GCC reads every operand from memory again at each use, between the stores, and
# arrays that lie at one offset from a page then make loads wait for stores that only look alike (64 Mi elements: 0.72
# -> 0.58 ns an element on Zen 4).
ISA_FLAGS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": [
        *["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"],
        *["-mprefer-vector-width=512", "-mtune=icelake-server"],
    ],
}
BUILT = list(ISA_FLAGS) if X86 else ["baseline"]

HEADERS = sorted(glob("csrc/**/*.h", recursive=True))
PYTHON_SOURCES = sorted(glob("csrc/python/*.c"))


def library(name, sources, flags=(), macros=()):
    """One static library, rebuilt when any header changes."""
    return name, {
        "sources": sources,
        "obj_deps": {"": HEADERS},
        "include_dirs": ["csrc"],
        "macros": list(macros),
        "cflags": [*FLAGS, *flags],
    }


class BuildExt(build_ext):
    """``build_ext`` that works when asked for alone: the libraries it links come first."""

    def run(self):
        self.run_command("build_clib")
        super().run()


def quoted(flags):
    return '"' + " ".join(flags) + '"'


# The linker reads them in this order: core calls the loops, so core comes first.
LIBRARIES = [
    library("bwd_core", sorted(glob("csrc/core/*.c")), macros=[(f"BWD_BUILT_{isa.upper()}", None) for isa in BUILT]),
    *(library(f"bwd_{isa}", [f"csrc/cpu/{isa}.c", f"csrc/cpu/{isa}_double.c"], ISA_FLAGS[isa]) for isa in BUILT),
]
EXTENSION = Extension(
    "bwdfuse._C",
    PYTHON_SOURCES,
    # With the sources of the libraries: a change of theirs alone must link the extension anew.
    depends=[*HEADERS, *(source for _, options in LIBRARIES for source in options["sources"])],
    include_dirs=["csrc", numpy.get_include()],
    define_macros=[
        ("Py_LIMITED_API", "0x030b0000"),
        ("BWD_FLAGS", quoted(FLAGS)),
        ("BWD_FLAGS_AVX2", quoted(ISA_FLAGS["avx2"] if X86 else [])),
        ("BWD_FLAGS_AVX512", quoted(ISA_FLAGS["avx512"] if X86 else [])),
        ("BWD_SANITIZE", quoted([SANITIZE] if SANITIZE else [])),
        *([("BWD_WITH_PLAN", None)] if "csrc/python/plan.c" in PYTHON_SOURCES else []),
    ],
    extra_compile_args=FLAGS,
    # At the end of the line, after the libraries that need it: a linker that drops unneeded ones reads left to right.
    extra_link_args=["-lm", "-pthread", *([f"-fsanitize={SANITIZE}"] if SANITIZE else [])],
    py_limited_api=True,
)
# The limited API and free-threaded CPython exclude each other.
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit("bwdfuse builds for the limited API (abi3), which free-threaded CPython does not offer yet")

variant = "-".join(filter(None, ["debug" if DEBUG else "", SANITIZE.replace(",", "-")]))
setup(
    libraries=LIBRARIES,
    ext_modules=[EXTENSION],
    cmdclass={"build_ext": BuildExt},
    options={
        "bdist_wheel": {"py_limited_api": "cp311"},
        # Objects of a sanitized or debug build must not be taken for those of a release build.
        **({"build": {"build_base": f"build/{variant}"}} if variant else {}),
    },
)
