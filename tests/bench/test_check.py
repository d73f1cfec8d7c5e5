"""What `tureen check` says of processors, by texts as Linux writes them; and what it reckons, by hand."""

import json
import math
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tureen.bench import check, limits, processor
from tureen.bench.limits import DEFAULT_WORK, Measured
from tureen.config import DEFAULT_MODEL, Config
from tureen.devices.base import DeviceInfo
from tureen.kernels.cpu import native

HASWELL = "fpu sse2 ssse3 fma sse4_1 sse4_2 avx f16c avx2 bmi2"
SKYLAKE = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ICE_LAKE = f"{SKYLAKE} avx512ifma avx512vbmi avx512_vbmi2 gfni vaes avx512_vnni avx512_bitalg"
ARMV8_2 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm"
GRAVITON_2 = f"{ARMV8_2} lrcpc dcpop asimddp ssbs"

PROCESSORS = {
    "Intel Xeon, Skylake-SP": (SKYLAKE, ["avx512", "avx2"]),
    "Intel Xeon, Cascade Lake": (f"{SKYLAKE} pku ospke avx512_vnni", ["avx512vnni", "avx512", "avx2"]),
    "Intel Xeon, Ice Lake": (ICE_LAKE, ["avx512vnni", "avx512", "avx2"]),
    "Intel Xeon, Sapphire Rapids": (
        f"{ICE_LAKE} avx_vnni avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8",
        ["amx", "avx512vnni", "avx512", "avxvnni", "avx2"],
    ),
    "Intel Core, Alder Lake": (f"{HASWELL} avx_vnni gfni vaes", ["avxvnni", "avx2"]),
    "AMD EPYC, Zen 3": (f"{HASWELL} vaes vpclmulqdq", ["avx2"]),
    "AMD EPYC, Zen 4": (f"{ICE_LAKE} avx512_bf16", ["avx512vnni", "avx512", "avx2"]),
    "AMD EPYC, Zen 5": (f"{ICE_LAKE} avx_vnni avx512_bf16", ["avx512vnni", "avx512", "avxvnni", "avx2"]),
    "before AVX2": ("fpu sse2 ssse3 sse4_1 sse4_2 avx", []),
}
ARM_PROCESSORS = {
    "Graviton 2": (GRAVITON_2, "0xd0c", ["neon"]),
    "Graviton 3": (f"{GRAVITON_2} sve svei8mm svebf16 i8mm bf16", "0xd40", ["i8mm", "neon"]),
    "Apple M1": (f"{ARMV8_2} jscvt fcma lrcpc dcpop sha3 asimddp sha512 asimdfhm dit", "0x022", ["neon"]),
    "Cortex-A72": ("fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid", "0xd08", []),
}


def _make_cpuinfo(name, flags):
    rest = f"vendor_id\t: GenuineIntel\nmodel name\t: {name}\ncache size\t: 512 KB\nflags\t\t: {flags}\n"
    return "\n".join(f"processor\t: {number}\n{rest}bugs\t\t: spectre_v1\n" for number in (0, 1))


def _read(name):
    flags, _ = PROCESSORS[name]
    return processor.parse_cpuinfo(_make_cpuinfo(name, flags))


def _ladder(machine):
    """Name and needs of each instruction set, best first, as the files in isa/ say."""
    found = []
    for file in (Path(native.__file__).parent / "src" / "isa").glob("*.h"):
        lines = (line.removeprefix("// ").partition(": ") for line in file.read_text().splitlines())
        keys = {key: value for key, colon, value in lines if colon}
        if keys["machine"] in (machine, "any"):
            found.append((int(keys["order"]), file.stem, keys.get("needs", "")))
    return [(name, needs) for _, name, needs in sorted(found, reverse=True)]


def _kernels(in_use, *isas):
    return SimpleNamespace(isa=lambda: in_use, isas=lambda: list(isas), needs_of_isas=lambda: [*_ladder("x86_64")])


def _could_run(found, machine):
    return [name for name, needs in _ladder(machine) if needs and found.has(needs)]


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_of_intel_or_amd_is_known_by_its_flags(name):
    found = _read(name)
    assert found.name == name
    assert _could_run(found, "x86_64") == PROCESSORS[name][1]


@pytest.mark.parametrize("name", ARM_PROCESSORS)
def test_a_processor_of_arm_is_known_by_its_features(name):
    features, part, expected = ARM_PROCESSORS[name]
    text = f"processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: {features}\nCPU implementer\t: 0x41\nCPU part\t: {part}\n"
    found = processor.parse_cpuinfo(text)
    assert found.name == f"implementer 0x41, part {part}"
    assert _could_run(found, "aarch64") == expected


@pytest.mark.parametrize("text", ["", "processor\t: 0\nhart\t: 0\nisa\t: rv64imafdc\n"])
def test_of_a_processor_that_says_nothing_nothing_is_claimed(text):
    found = processor.parse_cpuinfo(text)
    assert found.name == "unknown"
    assert processor.better(found, _kernels("portable", ("portable", True, True))) == []


def test_an_instruction_set_that_the_build_lacks_is_named_with_its_remedy():
    (line,) = processor.better(_read("Intel Core, Alder Lake"), _kernels("avx2", ("avx2", True, True)))
    assert line.startswith("avxvnni is missing")
    assert "make native" in line


def test_one_that_never_ran_on_such_a_processor_is_named_with_the_variable_that_tries_it():
    kernels = _kernels("avx512vnni", ("amx", True, False), ("avx512vnni", True, True), ("avx2", True, True))
    (line,) = processor.better(_read("Intel Xeon, Sapphire Rapids"), kernels)
    assert "TUREEN_CPU_ISA=amx" in line


def test_one_that_the_system_keeps_from_programs_is_told_so():
    kernels = _kernels("avx512vnni", ("amx", False, False), ("avx512vnni", True, True))
    (line,) = processor.better(_read("Intel Xeon, Sapphire Rapids"), kernels)
    assert "the system disables it" in line


def test_those_passed_over_by_choice_are_all_named():
    kernels = _kernels("avx2", ("avx512vnni", True, True), ("avx512", True, True), ("avx2", True, True))
    lines = processor.better(_read("AMD EPYC, Zen 4"), kernels)
    assert [line.split()[0] for line in lines] == ["avx512vnni", "avx512"]
    assert all("TUREEN_CPU_ISA chose another" in line for line in lines)


@pytest.mark.parametrize("name", ["Intel Xeon, Ice Lake", "AMD EPYC, Zen 5"])
def test_nothing_is_better_than_the_best(name):
    assert processor.better(_read(name), _kernels("avx512vnni", ("avx512vnni", True, True))) == []


def test_the_kernels_name_every_instruction_set_for_this_machine_with_its_needs():
    kernels = pytest.importorskip("tureen.kernels.cpu._native")
    if Path(kernels.__file__).parent.name == "models":
        pytest.skip("models need less")
    assert kernels.needs_of_isas() == _ladder(platform.machine())


@pytest.mark.parametrize(("lists", "cores"), [(["0-1", "0-1"], 1), (["0", "1"], 2), (["0,2", "1,3", "0,2", "1,3"], 2)])
def test_processors_of_one_core_are_counted_once(tmp_path, lists, cores):
    for index, siblings in enumerate(lists):
        (tmp_path / f"{index}").write_text(siblings + "\n")
    assert processor.count_cores(range(len(lists)), f"{tmp_path}/{{}}") == cores
    assert processor.count_cores(range(len(lists) + 1), f"{tmp_path}/{{}}") is None


def test_the_limits_are_those_reckoned_by_hand():
    # 100 MB of weights, 10 kB of cache a token: 102.56 MB for a token that has 256 behind it.
    # A million weights, 3 layers of 2 heads of 4: 2e6 + 4 * 24 * 256.5 = 2,024,624; and 512 * 100 of the head, once.
    work = limits.Work(
        model="m", weight_bytes=100_000_000, kv_bytes=10_000, weights=1_000_000, head_weights=51_200, attention=24
    )
    found = limits.allowed(work, [Measured(1, 10.256, 50.0), Measured(2, 20.512, 101.2412)])
    assert math.isclose(found.single, 200.0)
    assert math.isclose(found.prefill, 101.2412e9 / (2_024_624 + 200))


def test_a_second_thread_that_slows_things_does_not_lower_the_limits():
    found = limits.allowed(DEFAULT_WORK, [Measured(1, 20.0, 200.0), Measured(2, 10.0, 100.0)])
    assert found == limits.allowed(DEFAULT_WORK, [Measured(1, 20.0, 200.0)])


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([Measured(1, 20.0, 300.0)], False),
        ([Measured(1, 20.0, 300.0), Measured(2, 21.0, 590.0)], False),
        ([Measured(1, 20.0, 300.0), Measured(2, 40.0, 310.0)], True),
    ],
)
def test_processors_that_together_do_what_one_does_are_as_one_core(measured, expected):
    assert limits.is_like_one_core(measured) is expected


def test_one_thread_and_all_are_measured():
    kernels = SimpleNamespace(
        read_bandwidth=lambda threads, size, readings: 10.0 * threads, peak=lambda threads, seconds: 100.0 * threads
    )
    assert limits.measure(kernels, 1) == [Measured(1, 10.0, 100.0)]
    assert limits.measure(kernels, 3) == [Measured(1, 10.0, 100.0), Measured(3, 30.0, 300.0)]


@pytest.mark.model
def test_the_default_model_costs_what_its_files_say(default_model_source):
    runner = pytest.importorskip("tureen.runner.native")
    kernels = pytest.importorskip("tureen.kernels.cpu._native")
    loading = pytest.importorskip("tureen.runner.loading")
    source_module = pytest.importorskip("tureen.weights.source")
    model = loading.describe(source_module.model_config(default_model_source))
    device = DeviceInfo("cpu", "cpu", 1)
    planned, weight_bytes = runner.plan_weights(kernels, default_model_source, Config(), model, device)
    layers = [one for one in planned if ".layers." in one.name and len(one.shape) == 2]
    assert model.tie_embeddings  # so that the embedding's bytes are the head's
    cache = kernels.KvCache([(model.num_kv_heads, model.head_dim, -1, False)] * model.num_layers, 1, 16, "int16")
    assert msgspec.structs.asdict(DEFAULT_WORK) == {
        "model": DEFAULT_MODEL,
        "weight_bytes": weight_bytes,
        "kv_bytes": cache.bytes_per_token,
        "weights": sum(math.prod(one.shape) for one in layers),
        "head_weights": model.vocab_size * model.hidden_size,
        "attention": model.num_layers * model.num_heads * model.head_dim,
    }


def _make_report(**changed):
    machine = {
        "processor": "AMD EPYC",
        "cpus_usable": 2,
        "cpus": 4,
        "cores": 1,
        "threads": 2,
        "isa": "avx2",
        "fault": "",
        "better": ["avx512 is missing"],
        "measured": [Measured(1, 20.0, 300.0), Measured(2, 22.0, 330.0)],
        "allowed": limits.Allowed(214.0, 1400.0),
    }
    return check.Report(
        tureen="1",
        python="3",
        system="Linux",
        packages={"torch": None},
        machine=check.Machine(**{**machine, **changed}),
        device="cpu",
        free_gib=3.0,
    )


def test_each_line_says_one_thing():
    assert check.lines_of(_make_report()) == [
        "tureen       1",
        "python       3 on Linux",
        "torch        not installed",
        "device       cpu, 3.0 GiB free",
        "processor    AMD EPYC",
        "cpus         2 usable of 4, 2 threads by default; the system says 1 core",
        "kernels      avx2",
        "             avx512 is missing",
        "reads        22.0 GB/s with 2 threads, 1.1 times as much as with one",
        "int8         330 GOPS with 2 threads, 1.1 times as much as with one",
        "             more threads help little: these CPUs share a core, or other programs use them",
        "limits       of smollm2:135m here, if nothing but this took time:",
        "             214 tok/s for one stream: a token reads 98 MiB, weights and the cache of 256 tokens",
        "             1,400 tok/s of a prompt of 512 tokens: a token takes 230 million operations",
    ]


def test_without_kernels_the_remedy_is_told():
    lines = check.lines_of(_make_report(isa=None, fault=native.MISSING, better=[], measured=[], allowed=None))
    assert lines[-1] == f"kernels      {native.MISSING}"


def test_the_command_measures_this_machine_without_torch():
    pytest.importorskip("tureen.kernels.cpu._native")
    code = (
        "import sys\nfrom tureen.cli import command_line as cli\n"
        "assert cli.main(['check']) == 0\nassert cli.main(['check', '--json']) == 0\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["tureen", "python"]
    machine = json.loads(last)["machine"]
    assert machine["isa"] in done.stdout
    assert machine["allowed"]["single"] > 0
    assert machine["measured"][0]["threads"] == 1
