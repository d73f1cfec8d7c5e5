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
    "bench/test_check.py::test_the_command_measures_this_machine_without_torch": "it is a process without torch",
    "devices/test_devices.py::test_what_must_precede_torch_does_not_import_it": "imports are those of a new process",
    "engine/test_resumed_models.py::test_samples_under_a_schema_go_on": "constraints are compiled in worker processes",
    "fetching/test_hub.py": HUB,
    "fetching/test_on_disk.py": HUB,
    "fetching/test_package_index.py": HUB,
    "serving/test_lent_pixels.py::test_many_samples_in_a_process_cost_the_bytes_of_one": "pixels cross to a process",
    "serving/test_prefix_index.py::test_pages_have_the_same_names_in_every_process": "compares processes",
    "test_no_traceback.py::test_a_bad_model_is_one_line_of_each_command": "the port is bound before the model is read",
    "test_process_state.py": "pytest runs pytest",
    "test_start_refusals.py": "the port is bound before the model is read",
}
