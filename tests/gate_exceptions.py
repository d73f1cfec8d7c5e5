"""Files and tests of the gate that may leave their process. The list may only shrink (tools/ratchets.py).

By file, or by file and function: the reason.
"""

PICTURES = "pictures are decoded in worker processes"
HUB = "a hub on a local port plays the network"
SERVED = "a server on a local port is measured"

EXCEPTIONS: dict[str, str] = {
    "api/test_anthropic_fields.py": PICTURES,
    "api/test_chat_prompt.py": PICTURES,
    "api/test_dialect_folders.py": "git applies the diffs of a page",
    "api/test_media_fields.py": PICTURES,
    "api/test_openai_chat.py": PICTURES,
    "api/test_picture_tokens.py": PICTURES,
    "api/test_pictures_in_chats.py": PICTURES,
    "api/test_tls_files.py": "openssl makes the keys",
    "api/test_traces.py": "a collector on a local port takes the spans",
    "bench/test_bench_command.py": SERVED,
    "bench/test_bench_drive.py": SERVED,
    "bench/test_bench_structured.py": SERVED,
    "bench/test_check.py": "it measures without torch, in a process of its own",
    "devices/test_devices.py": "only a new process shows the imports of a module",
    "engine/test_resumed_models.py": PICTURES,
    "faults/test_failing_files.py": PICTURES,
    "fetching/test_hub.py": HUB,
    "fetching/test_on_disk.py": HUB,
    "fetching/test_package_index.py": HUB,
    "serving/test_lent_pixels.py": "pixels cross to a process",
    "serving/test_placing.py": "names are compared between processes",
    "test_no_traceback.py": "the port is bound before the model is read",
    "test_process_state.py": "pytest runs pytest",
    "test_start_refusals.py": "the port is bound before the model is read",
}
