"""Files and tests of the gate that may leave their process. The list may only shrink (tools/ratchets.py).

By file, or by file and function: the reason.
"""

HUB = "a hub on a local port plays the network"
SERVED = "a server on a local port is measured"

EXCEPTIONS: dict[str, str] = {
    "api/test_dialect_folders.py": "git applies the diffs of a page",
    "api/test_tls_files.py": "openssl makes the keys",
    "api/test_traces.py": "a collector on a local port takes the spans",
    "bench/test_bench_command.py": SERVED,
    "bench/test_bench_drive.py": SERVED,
    "bench/test_bench_structured.py": SERVED,
    "bench/test_check.py": "it measures without torch, in a process of its own",
    "devices/test_devices.py": "only a new process shows the imports of a module",
    "engine/test_resumed_models.py": "constraints are compiled in worker processes",
    "fetching/test_hub.py": HUB,
    "fetching/test_on_disk.py": HUB,
    "fetching/test_package_index.py": HUB,
    "serving/test_lent_pixels.py": "pixels cross to a process",
    "serving/test_placing.py": "names are compared between processes",
    "test_no_traceback.py": "the port is bound before the model is read",
    "test_process_state.py": "pytest runs pytest",
    "test_start_refusals.py": "the port is bound before the model is read",
}
