"""What is built and shipped: warnings, exports, packed maths per instruction set, sanitizers, a wheel without torch."""

import glob
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import numpy as np
import pytest

from bwdfuse import _C

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = _C.build_info()
ISAS = _C.isa_info()["built"]
# A command each. clang also comes in the package ziglang, which needs no administrator; CI installs it.
COMPILERS = {c: [c] for c in ("gcc", "clang") if shutil.which(c)}
if "clang" not in COMPILERS and importlib.util.find_spec("ziglang"):
    COMPILERS["clang"] = [sys.executable, "-m", "ziglang", "cc"]
WARNINGS = "-Wall -Wextra -Wshadow -Wstrict-prototypes -Wvla -Werror".split()
SOURCES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("csrc/**/*.c"))
# Exactly the bits of a release, whatever the optimisation.
FLOAT_FLAGS = "-ffp-contract=off -fno-math-errno -fno-trapping-math".split()

MACROS = [
    *("-DPy_LIMITED_API=0x030b0000", "-DBWD_WITH_PLAN"),
    *(f'-DBWD_{m}=""' for m in ("FLAGS", "FLAGS_AVX2", "FLAGS_AVX512", "SANITIZE")),
]

needs_compiler = pytest.mark.skipif(not COMPILERS, reason="no C compiler")
needs_source = pytest.mark.skipif(not SOURCES, reason="the tests run without the source tree")


def run(*command, **kwargs):
    """Runs a command that must succeed; its output goes into the failure."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def isa_of(source):
    name = pathlib.Path(source).stem.removesuffix("_double")
    return name if source.startswith("csrc/cpu/") else "baseline"


def compile_object(compiler, source, target, *flags):
    includes = ["-Icsrc", "-isystem", sysconfig.get_paths()["include"], "-isystem", np.get_include()]
    # the tuning is GCC's, and changes no bit
    isa_flags = [f for f in BUILD["isa_flags"][isa_of(source)].split() if compiler == "gcc" or "-mtune" not in f]
    built = [f"-DBWD_BUILT_{isa.upper()}" for isa in ISAS]
    run(
        *COMPILERS[compiler],
        "-std=c11",
        *FLOAT_FLAGS,
        *flags,
        *isa_flags,
        *built,
        *includes,
        "-c",
        source,
        "-o",
        target,
        cwd=ROOT,
    )
    return target


@needs_source
@needs_compiler
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiles_without_a_warning(compiler, source, tmp_path):
    if isa_of(source) not in ISAS:
        pytest.skip("an instruction set of another architecture")
    # CPython's slot tables hold functions as void pointers, which ISO C does not know.
    pedantic = [] if source.startswith("csrc/python/") else ["-pedantic"]
    compile_object(compiler, source, tmp_path / "o.o", *WARNINGS, *pedantic, *MACROS, "-O2")


def disassembly(isa, tmp_path):
    """Instruction lists by function, of the loops of one instruction set as a release compiles them."""
    flags = [f for f in BUILD["flags"].split() if not f.startswith("-W")]
    functions = {}
    lines = []
    for name in (isa, f"{isa}_double"):
        target = compile_object(next(iter(COMPILERS)), f"csrc/cpu/{name}.c", tmp_path / f"{name}.o", *flags)
        lines += run("objdump", "-d", "--no-show-raw-insn", "-M", "att", target).splitlines()
    for line in lines:
        if start := re.match(r"[0-9a-f]+ <(\w+)[\w.]*>:", line):
            current = functions.setdefault(start[1], [])
        elif "\t" in line:
            current.append(line.split("\t", 1)[1])
    return functions


@needs_source
@needs_compiler
@pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump")
@pytest.mark.skipif(BUILD["debug"] or BUILD["sanitize"] != "", reason="not a release build")
@pytest.mark.skipif("avx2" not in ISAS, reason="the patterns are those of x86")
@pytest.mark.parametrize("isa", ISAS)
def test_every_loop_is_packed(isa, tmp_path):
    """A compiler that stops vectorising is seen here and not in a benchmark.

    The update loops of baseline are exempt: without the instruction, a fused multiply-add is a call per element.
    """
    register = {"avx512": "%zmm", "avx2": "%ymm", "baseline": "%xmm"}[isa]
    functions = disassembly(isa, tmp_path)
    dtype = "(f32|bf16|f16|f64)"
    updates = [name for name in functions if re.fullmatch(rf"bwd_adam\w*_{dtype}_{dtype}_{dtype}", name)]
    scans = [name for name in functions if name.startswith("bwd_scan_")]
    assert len(updates) == 4 * 11 and len(scans) == 4, sorted(functions)

    def count(name, operation):
        return sum(1 for i in functions[name] if re.match(rf"v?{operation}\s", i) and register in i)

    for name in scans:
        # Squares of doubles may run at half the width of the floats they come from.
        assert sum(1 for i in functions[name] if re.match(r"v?(mul|fmadd\d+)pd\s", i)) >= 4, name
        assert not any(re.match(r"v?(mul|fmadd\d+)sd\s", i) for i in functions[name]), name
    if isa == "baseline":
        return
    for name in updates:
        kind = "d" if name.endswith("f64") else "s"
        for operation in ("sqrt", "div", r"fmadd\d+", "mul", "sub"):
            assert count(name, f"{operation}p{kind}") >= 1, f"{name}: no {operation}p{kind} on {register}"
        scalar = [i for i in functions[name] if re.match(r"v(sqrt|div|mul|sub|fn?m(add|sub)\d+)s[sd]\s", i)]
        assert not scalar, f"{name}: {scalar[:5]}"


def native_program(name, directory, *flags):
    """tests/native/NAME.c with the core and every instruction set, compiled alike."""
    sources = [s for s in SOURCES if s.startswith(("csrc/core/", "csrc/cpu/")) and isa_of(s) in ISAS]
    compiler = next(iter(COMPILERS))
    objects = [
        compile_object(compiler, source, directory / f"{k}.o", *flags, *WARNINGS)
        for k, source in enumerate([*sources, f"tests/native/{name}.c"])
    ]
    sanitize = [flag for flag in flags if flag.startswith("-fsanitize")]
    run(*COMPILERS[compiler], *sanitize, *objects, "-lm", "-pthread", "-o", directory / name)
    return directory / name


@needs_source
@needs_compiler
@pytest.mark.parametrize("optimise", ["-O0", "-O2"])
def test_core_under_sanitizers(optimise, tmp_path):
    """The native check over every instruction set, format and memory order, under ASan and UBSan."""
    flags = [optimise, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    assert run(native_program("check_core", tmp_path, *flags)).strip().endswith(" 0 failures")


@needs_source
@needs_compiler
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_pool_under_sanitizers(sanitizers, tmp_path):
    flags = ["-O2", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    program = native_program("check_pool", tmp_path, *flags)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel places memory where this ThreadSanitizer does not expect it")
    assert done.returncode == 0 and done.stdout == "pool: 0 failures\n", done.stderr[:4000]


@needs_source
@needs_compiler
def test_pool_in_forked_children(tmp_path):
    """Plain, since the sanitizers' own locks do not survive a fork of a process with busy threads."""
    assert run(native_program("check_pool", tmp_path, "-O2"), "fork", timeout=300) == "pool: 0 failures\n"


def extension_path():
    return pathlib.Path(_C.__file__)


@pytest.mark.skipif(not shutil.which("nm"), reason="no nm")
def test_exports_the_init_function_alone():
    symbols = [line.split()[-1] for line in run("nm", "-D", "--defined-only", extension_path()).splitlines()]
    symbols = [s for s in symbols if not s.startswith(("__asan", "__ubsan", "_edata", "_end", "__bss_start"))]
    assert symbols == ["PyInit__C"]


@pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf")
def test_names_the_libraries_it_needs():
    """libm must be named: an extension that finds it by accident fails in repaired wheels."""
    needed = re.findall(r"NEEDED.*\[(.+?)\]", run("readelf", "-d", extension_path()))
    assert any(name.startswith("libm.so") for name in needed)
    assert not any("python" in name or "torch" in name for name in needed)


def test_is_built_for_the_stable_abi():
    assert ".abi3." in extension_path().name


def build_extension(directory, **environment):
    """The extension alone, under other switches, as an importable package in `directory`."""
    run(
        sys.executable,
        ROOT / "setup.py",
        "-q",
        *("build_clib", "--build-temp", directory / "c", "--build-clib", directory / "c"),
        *("build_ext", "--build-temp", directory / "e", "--build-lib", directory),
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    (directory / "bwdfuse" / "__init__.py").touch()
    return {**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{ROOT / 'tests'}"}


PINNED = """
import bwdfuse, test_kernels
from kernel_reference import FORMATS, ISAS
assert bwdfuse.__file__.startswith({directory!r}), bwdfuse.__file__
for fmt in FORMATS:
    for isa in ISAS:
        test_kernels.test_bits_are_those_of_every_release(fmt, isa)
print(bwdfuse._C.build_info())
"""


@needs_source
@pytest.mark.skipif("clang" not in COMPILERS, reason="no clang: pip install ziglang")
def test_another_compiler_gives_the_same_bits(tmp_path):
    sources = [s for s in SOURCES if isa_of(s) in ISAS]
    flags = ["-O3", "-fPIC", "-fvisibility=hidden", *MACROS]
    objects = [compile_object("clang", s, tmp_path / f"{k}.o", *flags) for k, s in enumerate(sources)]
    package = tmp_path / "bwdfuse"
    package.mkdir()
    (package / "__init__.py").touch()
    run(*COMPILERS["clang"], "-shared", *objects, "-lm", "-pthread", "-o", package / "_C.abi3.so")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'tests'}"}
    out = run(sys.executable, "-c", PINNED.format(directory=str(tmp_path)), env=environment, cwd=tmp_path)
    assert "clang" in out.lower()


@needs_source
@needs_compiler
def test_debug_build_gives_the_same_bits(tmp_path):
    environment = build_extension(tmp_path, BWDFUSE_DEBUG="1", BWDFUSE_WERROR="1")
    out = run(sys.executable, "-c", PINNED.format(directory=str(tmp_path)), env=environment, cwd=tmp_path)
    assert "'debug': True" in out and "-O0" in out


@needs_source
@pytest.mark.skipif("gcc" not in COMPILERS, reason="needs the runtime of gcc")
def test_sanitized_build_runs(tmp_path):
    runtime = run("gcc", "-print-file-name=libasan.so").strip()
    if not os.path.isabs(runtime):
        pytest.skip("gcc has no AddressSanitizer runtime")
    environment = build_extension(tmp_path, BWDFUSE_SANITIZE="address,undefined", CC="gcc")
    environment.update(LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0")
    out = run(sys.executable, "-c", PINNED.format(directory=str(tmp_path)), env=environment, cwd=tmp_path)
    assert "'sanitize': 'address,undefined'" in out


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """A virtual environment that borrows what a build needs from this one, and nothing else: no torch."""
    directory = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", directory)
    python = directory / "bin" / "python"
    site = pathlib.Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    for package in ("numpy", "setuptools", "wheel", "packaging", "pip"):
        try:
            files = importlib.metadata.distribution(package).files
        except importlib.metadata.PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            source = importlib.metadata.distribution(package).locate_file(top)
            (site / top).symlink_to(source)
    missing = subprocess.run([python, "-c", "import torch"], capture_output=True)
    assert missing.returncode != 0
    return python


@pytest.fixture(scope="module")
def sdist(tmp_path_factory, bare_python):
    if not (ROOT / "setup.py").exists():
        pytest.skip("the tests run without the source tree")
    directory = tmp_path_factory.mktemp("sdist")
    work = directory / "tree"
    # A copy, so that setuptools' own leavings do not land in the working tree.
    shutil.copytree(
        ROOT,
        work,
        ignore=shutil.ignore_patterns(".git", ".venv*", "build", "out", "dist", "*.egg-info", "*.so", "__pycache__"),
    )
    run(bare_python, "setup.py", "-q", "sdist", "--dist-dir", directory, cwd=work)
    (archive,) = directory.glob("*.tar.gz")
    return archive


def test_sdist_holds_every_source(sdist):
    with tarfile.open(sdist) as archive:
        shipped = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = [*glob.glob("csrc/**/*.[ch]", root_dir=ROOT, recursive=True), "setup.py", "pyproject.toml", "LICENSE"]
    assert len(wanted) > 15
    assert not set(wanted) - shipped


def test_wheel_from_sdist_needs_no_torch(sdist, bare_python, tmp_path):
    """pip builds a wheel from the sdist in an environment without torch, installs it, and a step runs."""
    options = ["--no-build-isolation", "--no-deps", "--no-index", "-q"]
    run(bare_python, "-m", "pip", "wheel", *options, sdist, "-w", tmp_path)
    (wheel,) = tmp_path.glob("bwdfuse-*.whl")
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.startswith("bwdfuse/_C.") for name in names) and "bwdfuse/functional.py" in names
    assert not any(name.startswith(("csrc", "tests", "benchmarks")) for name in names)
    run(bare_python, "-m", "pip", "install", *options, "--force-reinstall", wheel)
    script = (
        "import numpy as np, bwdfuse; from bwdfuse.functional import adamw_;"
        "a = [np.ones(100, 'f4') for _ in range(4)]; r = adamw_(*a, step=1);"
        "assert r == (100.0, 0), r; assert (a[0] < 1).all()"
    )
    run(bare_python, "-c", script, cwd=tmp_path)
