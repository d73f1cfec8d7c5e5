"""What becomes of the blocks of code on pages that tests/ledgers/pages/test_every_block.py does not run: words of the
block -> the file of the test that runs it, or why none does."""

SHOWN = "not run: it shows, and has no command"
START = "not run: it starts a server with a setting, which tests/servers and tests/api start in the same way"
CLUSTER = "not run: it needs containers or a cluster; tests/servers/test_deployments.py starts its command"
CLIENT = "not run: it needs a program of another project"
PEER = "not run: it needs another server, or a model that is too large"
LONG = "not run: it takes minutes; it is a target of the Makefile or a tool, run by people"

BLOCKS = {
    "adapters.md": {
        "make serve ARGS='--lora-paths whisper=ex": START,
        '  -d \'{"text": ["Who is Ada Lovelace?",': "tests/api/test_adapters_page.py",
        "curl http://127.0.0.1:30000/load_lora_ad": "tests/api/test_adapters_page.py",
        '  -d \'{"text": "<|im_start|>user\\nWhat d': "tests/api/test_adapters_page.py",
    },
    "adding-a-backend.md": {
        "git apply backend.diff": "tests/ledgers/pages/test_adding_pages.py",
        "+++ b/tureen/attention/float64.py": "tests/ledgers/pages/test_adding_pages.py",
    },
    "adding-a-dialect.md": {
        "git apply dialect.diff": "tests/ledgers/pages/test_adding_pages.py",
        "+++ b/tureen/dialects/toy/dialect.py": "tests/ledgers/pages/test_adding_pages.py",
        "curl http://127.0.0.1:30000/toy": "tests/ledgers/pages/test_adding_pages.py",
    },
    "adding-a-model.md": {
        "git apply model.diff": "tests/ledgers/pages/test_adding_pages.py",
        "+++ b/tureen/models/helium.py": "tests/ledgers/pages/test_adding_pages.py",
    },
    "adding-a-parameter.md": {
        "git apply parameter.diff": "tests/ledgers/pages/test_adding_pages.py",
        "+++ b/tureen/contract/params.py": "tests/ledgers/pages/test_adding_pages.py",
        "curl http://127.0.0.1:30000/generate": "tests/ledgers/pages/test_adding_pages.py",
    },
    "api.md": {
        '  "text": " Paris.",': "tests/api/test_api_page.py",
        '{"error": {"message": "unknown field \'te': "tests/api/test_api_page.py",
        "30000/health\n": "tests/api/test_api_page.py",
        "30000/v1/chat/completions": "tests/api/test_api_page.py",
        "30000/v1/tokenize": "tests/api/test_api_page.py",
        "30000/encode": "tests/api/test_api_page.py",
        "30000/v1/conversations": "tests/api/test_api_page.py",
        "30000/v1/files": "tests/api/test_api_page.py",
        "30000/v1/models": "tests/api/test_api_page.py",
        "30000/model_info": "tests/api/test_api_page.py",
        "30000/abort_request": "tests/api/test_api_page.py",
    },
    "architecture.md": {
        ".venv/bin/python -m pytest -n0 -s tests/": "not run: it runs a test, which the suite has",
        " HTTP ──> dialects/<API> ──Draft──> requ": SHOWN,
        "step = runner.submit(Batch(rows, new_slo": SHOWN,
        "head -8 tureen/cache/__init__.py": "not run: `make check` runs it",
        ".venv/bin/python tools/ratchets.py --lis": "not run: `make check` runs it",
    },
    "batches.md": {
        "tureen serve --batch-path ~/tureen-batch": START,
        "cat > in.jsonl <<'END'": "tests/servers/test_batches_server.py",
    },
    "chat.md": {
        '  "name": "my_model",': "tests/ledgers/pages/test_pages_of_servers.py",
    },
    "check.md": {
        "$ tureen check": "not run: what it shows depends on the machine; tests/test_cli.py runs the command",
        "$ tureen doctor": "not run: what it shows depends on the machine; tests/test_cli.py runs the command",
    },
    "clients.md": {
        "from openai import OpenAI": "tests/ledgers/pages/test_pages_of_servers.py",
    },
    "command-line.md": {
        "tureen serve MODEL --max-model-len 4096": "tests/ledgers/pages/test_pages_of_servers.py",
        "tureen config show --changed --config tu": "tests/ledgers/pages/test_pages_of_servers.py",
        "tureen serve --uds /run/user/1000/tureen": "tests/ledgers/pages/test_pages_of_servers.py",
        'eval "$(tureen completion bash)"': "tests/ledgers/pages/test_pages_of_servers.py",
    },
    "connect-a-client.md": {
        "tureen serve --model qwen2.5-coder:0.5b": START,
        "open-webui serve": "tests/clients/open_webui/check_open_webui.py",
        "export ANTHROPIC_SMALL_FAST_MODEL": "tests/clients/agents/check_claude_code.py",
        'wire_api = "responses"': "tests/clients/agents/check_codex.py",
        "cline auth openai": "tests/clients/agents/check_cline.py",
        "API Provider   OpenAI Compatible": CLIENT,
        "provider: openai": "tests/clients/agents/check_continue.py",
        "aider --model openai/default": "tests/clients/agents/check_aider.py",
        "from langchain_openai import ChatOpenAI": "tests/clients/common/check_langchain.py",
        "from litellm import completion": "tests/clients/litellm/check_litellm.py",
        "endpoints:": "tests/clients/agents/check_librechat.py",
    },
    "deployment.md": {
        "docker build -f deploy/docker/Dockerfile": CLUSTER,
        "000 -v models:/var/cache/tureen tureen \\": CLUSTER,
        "helm install tureen deploy/helm/tureen -": CLUSTER,
        "model: qwen2.5-coder:0.5b": "tests/ledgers/deploy/test_helm_chart.py",
        "pip install smg": PEER,
        "kubectl apply -f deploy/kubernetes/turee": CLUSTER,
        "prometheus --config.file=deploy/monitori": CLUSTER,
    },
    "embeddings.md": {
        "tureen serve --model-path minilm    # an ": "tests/api/test_embeddings_page.py",
        "curl http://127.0.0.1:30000/v1/rerank -H": "tests/api/test_embeddings_page.py",
        "curl http://127.0.0.1:30000/v2/rerank -H": "tests/api/test_embeddings_page.py",
        "curl http://127.0.0.1:30000/embed -H 'Co": "tests/api/test_embeddings_page.py",
        "curl http://127.0.0.1:30000/classify -H ": "tests/api/test_embeddings_page.py",
    },
    "fields-that-have-no-effect.md": {
        "HTTP/1.1 200 OK": SHOWN,
    },
    "five-minutes.md": {
        "tureen serve   ": START,
    },
    "first-run.md": {
        "git clone … tureen && cd tureen": "not run: tests/first_run does, for people",
        "# wheels in dist/, each tested": LONG,
    },
    "kv-tiers.md": {
        "tureen serve --kv-disk ~/.cache/tureen/k": START,
    },
    "media.md": {
        "tureen serve --model-path ggml-org/Qwen2": PEER,
        "tureen models build shapes-vlm": "tests/servers/test_shapes_vlm_server.py",
        "python3 -c 'import base64, json; print(j": "tests/servers/test_shapes_vlm_server.py",
    },
    "migrate-from-ollama.md": {
        "ollama create pirate -f Modelfile": "tests/test_ollama_migration.py",
    },
    "migrate-from-llamacpp.md": {
        "llama-server -m model.gguf -c 4096 --por": PEER,
    },
    "migrate-from-sglang.md": {
        "python -m sglang.launch_server --model-p": PEER,
    },
    "migrate-from-vllm.md": {
        "vllm serve MODEL --port 8000 --max-model": PEER,
    },
    "models-by-name.md": {
        "tureen pull smollm2:135m": "tests/ledgers/pages/test_pages_of_commands.py",
        "$ tureen show smollm2:135m": "tests/ledgers/pages/test_pages_of_commands.py",
    },
    "models.md": {
        "tureen models": "tests/ledgers/pages/test_pages_of_servers.py",
    },
    "native-kernels.md": {
        "tureen check": START,
        "// AVX2 with VNNI in its 256-bit encodin": SHOWN,
    },
    "operations.md": {
        "tureen serve --itl-goal-ms": START,
        "curl http://127.0.0.1:30000/v1/loads": "tests/ledgers/pages/test_pages_of_servers.py",
        "curl http://127.0.0.1:30000/update_weigh": "tests/ledgers/pages/test_pages_of_weights.py",
        "curl -X POST http://127.0.0.1:30000/rele": "tests/ledgers/pages/test_pages_of_servers.py",
        "curl http://127.0.0.1:30000/health": SHOWN,
        "curl http://127.0.0.1:30000/start_profil": "tests/ledgers/pages/test_pages_of_servers.py",
        "pip install 'tureen[otel]'": "not run: it needs a collector; tests/api/test_traces.py has one",
        "tureen serve --log-format json": "tests/ledgers/pages/test_pages_of_servers.py",
        "1:30000/start_expert_distribution_record": "tests/ledgers/pages/test_pages_of_weights.py",
    },
    "training-loops.md": {
        "update_weights_from_safetensors?weight_v": "tests/api/test_received_weights.py",
        "from safetensors.torch import save": "tests/api/test_received_weights.py",
        "127.0.0.1:30000/init_weights_update_grou": "not run: it needs a trainer; tests/servers/test_weight_group.py",
    },
    "performance.md": {
        "tureen check": LONG,
        "make gpu-check": LONG,
        "python bench/accuracy.py MODEL.gguf ours": LONG,
        "python bench/first_answers.py http://127": LONG,
    },
    "gpu.md": {
        "tureen serve MODEL --device cuda": "not run: it needs a CUDA device",
        "python3 tools/gpu_check.py  ": LONG,
    },
    "playground.md": {
        "make serve        # then open http://127": START,
    },
    "processors.md": {
        "tureen serve --enable-custom-logit-proce": "tests/ledgers/pages/test_examples.py",
        "from tureen.logit_processor import Custo": "tests/ledgers/pages/test_pages_of_servers.py",
    },
    "quantised-checkpoints.md": {
        "tureen serve --model-path /models/Qwen2.": PEER,
    },
    "quotas.md": {
        "printf 'alice  8kx0dJ2mF0sW1Yq5\\nbatch": "tests/ledgers/pages/test_pages_of_servers.py",
        "tureen serve --api-key-file keys --usage": "tests/ledgers/pages/test_pages_of_servers.py",
    },
    "releases.md": {
        "pip install 'tureen==0.2.*'": LONG,
        "pip install --require-hashes -r tureen-0": LONG,
    },
    "reliability.md": {
        "tureen serve --engine process &": "not run: it kills by name; that of reproducibility.md is run",
        "make coverage ARGS=quotas           # li": LONG,
    },
    "reproducibility.md": {
        "cmp alone among": "tests/ledgers/pages/test_pages_of_servers.py",
        "cmp whole killed": "tests/ledgers/pages/test_pages_of_servers.py",
        "python examples/recompute.py": "tests/ledgers/pages/test_examples.py",
    },
    "responses.md": {
        "tureen serve --responses-store /var/lib/": START,
        '  -d \'{"input": "My name is Ada.", "rid"': "tests/api/test_chat_pages.py",
    },
    "scaling.md": {
        "tureen serve --replicas 2 &": "not run: it kills by name, as tests/servers/test_replicas_server.py does by id",
        "curl -X POST http://127.0.0.1:30000/repl": "tests/ledgers/pages/test_pages_of_weights.py",
        "curl -X POST http://127.0.0.1:30000/upda": "tests/ledgers/pages/test_pages_of_weights.py",
        "tureen serve --min-replicas 1 --max-repl": START,
        "tureen serve --replicas 2 --prefill-repl": START,
        "tureen engine smollm2:135m --listen 127.": "not run: tests/servers/test_remote_replicas_server.py does",
        "tureen engine MODEL --listen 0.0.0.0:700": PEER,
        "pip install 'tureen[ray]'": PEER,
        "tureen serve --tensor-parallel-size 2": START,
        "tureen serve --pipeline-parallel-size 2": START,
        "tureen serve --api-workers 2 &": "tests/ledgers/pages/test_pages_of_servers.py",
        "tureen bench --growth     # a few minute": LONG,
    },
    "security.md": {
        "printf 'alice  8kx0dJ2mF0sW1Yq5\\n' > key": "tests/ledgers/pages/test_pages_of_servers.py",
        "tureen serve --allowed-origins https://c": START,
        "tureen serve --host 0.0.0.0 --allowed-ho": START,
        "curl -i http://127.0.0.1:30000/version -": "tests/ledgers/pages/test_pages_of_servers.py",
        "curl http://127.0.0.1:30000/generate -H": "tests/ledgers/pages/test_pages_of_servers.py",
        "# NAME KEY, one client a line": "tests/ledgers/pages/test_pages_of_servers.py",
        "ver.key.pem                      # HTTPS": START,
        "openssl req -x509 -newkey ec -pkeyopt ec": "tests/ledgers/pages/test_pages_of_servers.py",
        "touch index.txt; echo 01 > crlnumber": "tests/ledgers/pages/test_pages_of_servers.py",
    },
    "sessions.md": {
        "import requests": "tests/ledgers/pages/test_pages_of_servers.py",
        "tureen serve --sessions-db": START,
        '"session_id": "kept", "durable": true': "tests/api/test_sessions_page.py",
    },
    "settings.md": {
        "tureen serve --context-length 4096": "tests/ledgers/pages/test_pages_of_servers.py",
    },
    "several-models.md": {
        "make serve ARGS='--model smollm2:135m --": "tests/ledgers/pages/test_pages_of_commands.py",
        "models_memory = 8_000_000_000": "tests/ledgers/pages/test_pages_of_commands.py",
        "curl -s http://127.0.0.1:30000/status |": "tests/ledgers/pages/test_pages_of_commands.py",
        "curl http://127.0.0.1:30000/v1/embedding": "tests/ledgers/pages/test_pages_of_commands.py",
        "curl http://127.0.0.1:30000/models/load": "tests/ledgers/pages/test_pages_of_commands.py",
    },
    "status.md": {
        "tureen serve": START,
    },
    "streams.md": {
        "tureen serve --resume-grace 60": "tests/ledgers/pages/test_pages_of_servers.py",
    },
    "structured-outputs.md": {
        '{"type": "structural_tag", "triggers": [': "tests/ledgers/pages/test_pages_of_servers.py",
        '{"type": "structural_tag", "format": {"t': "tests/ledgers/pages/test_pages_of_servers.py",
    },
    "speculative-decoding.md": {"tureen serve": START},
    "terminal.md": {
        "the server on port 30000, or loads a model": "not run: tests/servers/test_chat_command.py types it",
        "$ tureen chat": "not run: it shows chance; tests/servers/test_chat_command.py types it",
        'echo "What is the capital of Japan?" |': "tests/ledgers/pages/test_pages_of_commands.py",
        "cat > prompts.jsonl <<'END'": "tests/ledgers/pages/test_pages_of_commands.py",
    },
    "troubleshooting.md": {
        "tureen doctor": "tests/test_cli.py",
    },
    "tutorial.md": {
        "python3 -m venv venv": "not run: tests/first_run installs so, for people",
        "tureen serve\n": START,
        "tureen show qwen2.5-coder:0.5b": "tests/ledgers/pages/test_pages_of_commands.py",
        "cat > keys.txt": "tests/ledgers/pages/test_pages_of_commands.py",
        "tureen serve --config tureen.toml": "tests/ledgers/pages/test_pages_of_commands.py",
    },
    "which-model.md": {
        "tureen show smollm2:135m": "tests/ledgers/pages/test_pages_of_commands.py",
    },
    "README.md": {
        "make serve        # creates .venv, fetch": START,
        "make serve PORT=8000 MODEL=/models/Llama": PEER,
        "pip install .": "tests/ledgers/pages/test_pages_of_servers.py",
        "import tureen": "tests/ledgers/pages/test_pages_of_servers.py",
    },
    "CONTRIBUTING.md": {
        "make install      # .venv with tureen in": LONG,
    },
}
