"""What becomes of the blocks of code on pages that test_every_block.py does not run: words of the block -> the file of
the test that runs it, or why none does."""

SHOWN = "not run: it shows, and has no command"
START = "not run: it starts a server with a setting, which tests/e2e and tests/api start in the same way"
OPEN = "not run: no test runs it yet"
CLUSTER = (
    "not run: it needs containers or a cluster; tests/e2e/test_deployments.py and test_helm_chart.py start its command"
)
PEER = "not run: it needs another server, or a model that is too large"
LONG = "not run: it takes minutes; it is a target of the Makefile or a tool, run by people"

BLOCKS = {
    "adapters.md": {
        "make serve ARGS='--lora-paths whisper=ex": START,
        '  -d \'{"text": ["Who is Ada Lovelace?",': "tests/api/test_adapters_page.py",
        "curl http://127.0.0.1:30000/load_lora_ad": "tests/api/test_adapters_page.py",
        '  -d \'{"text": "<|im_start|>user\\nWhat d': "tests/api/test_adapters_page.py",
    },
    "adding-a-dialect.md": {
        ".venv/bin/python -m pytest -n0 tests/api": "not run: it runs a test, which the suite has",
        "tureen/dialects/toy/": SHOWN,
        "TABLE = read_tables(Path(__file__).with_": SHOWN,
        'unknown = "told"   # what becomes of fie': SHOWN,
    },
    "api.md": {
        '  "text": " Paris.",': "tests/api/test_api_page.py",
        '{"error": {"message": "unknown field \'te': "tests/api/test_api_page.py",
        "curl http://127.0.0.1:30000/health": "tests/api/test_api_page.py",
    },
    "architecture.md": {
        ".venv/bin/python -m pytest -n0 -s tests/": "not run: it runs a test, which the suite has",
        " HTTP ──> dialects/<API> ──Draft──> requ": SHOWN,
        "step = runner.submit(Batch(rows, new_slo": SHOWN,
        'ATTENTION_BACKENDS = ("mine",)  # --atte': SHOWN,
        "head -8 tureen/cache/__init__.py": "not run: `make check` runs it",
        ".venv/bin/python tools/ratchets.py --lis": "not run: `make check` runs it",
    },
    "batches.md": {
        "tureen serve --batch-path ~/tureen-batch": START,
        "cat > in.jsonl <<'END'": "tests/e2e/test_batches_server.py",
    },
    "chat.md": {
        '  "name": "my_model",': OPEN,
    },
    "check.md": {
        "$ tureen check": "not run: what it shows depends on the machine; tests/test_cli.py runs the command",
        "$ tureen doctor": "not run: what it shows depends on the machine; tests/test_cli.py runs the command",
    },
    "clients.md": {
        "from openai import OpenAI": OPEN,
    },
    "command-line.md": {
        "tureen serve MODEL --max-model-len 4096": OPEN,
        "tureen config show --changed --config tu": OPEN,
        "tureen serve --uds /run/user/1000/tureen": OPEN,
        'eval "$(tureen completion bash)"': OPEN,
    },
    "deployment.md": {
        "docker build -f deploy/docker/Dockerfile": CLUSTER,
        "000 -v models:/var/cache/tureen tureen \\": CLUSTER,
        "helm install tureen deploy/helm/tureen -": CLUSTER,
        "model: qwen2.5-coder:0.5b": "tests/e2e/test_helm_chart.py",
        "pip install smg": PEER,
        "kubectl apply -f deploy/kubernetes/turee": CLUSTER,
        "prometheus --config.file=deploy/monitori": CLUSTER,
    },
    "embeddings.md": {
        "tureen serve --model-path pypi:gt-all-mi": "tests/api/test_embeddings_page.py",
        "curl http://127.0.0.1:30000/v1/rerank -H": "tests/api/test_embeddings_page.py",
    },
    "fields-that-have-no-effect.md": {
        "HTTP/1.1 200 OK": SHOWN,
    },
    "first-run.md": {
        "git clone … tureen && cd tureen": "not run: tests/first_run does, for people",
        "# wheels in dist/, each tested": LONG,
    },
    "kv-tiers.md": {
        "tureen serve --kv-disk ~/.cache/tureen/k": START,
    },
    "media.md": {
        "tureen models build shapes-vlm": OPEN,
        "python3 -c 'import base64, json; print(j": OPEN,
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
        "tureen pull smollm2:135m": OPEN,
        "$ tureen show smollm2:135m": "tests/e2e/test_pages_of_commands.py",
    },
    "models.md": {
        "tureen models": OPEN,
    },
    "native-kernels.md": {
        "tureen check": OPEN,
        "// AVX2 with VNNI in its 256-bit encodin": SHOWN,
    },
    "operations.md": {
        "curl http://127.0.0.1:30000/v1/loads": OPEN,
        "curl http://127.0.0.1:30000/update_weigh": OPEN,
        "curl -X POST http://127.0.0.1:30000/rele": OPEN,
        "curl http://127.0.0.1:30000/health": SHOWN,
        "curl http://127.0.0.1:30000/start_profil": OPEN,
        "pip install 'tureen[otel]'": OPEN,
        "tureen serve --log-format json": OPEN,
        "1:30000/start_expert_distribution_record": OPEN,
    },
    "performance.md": {
        "tureen check": LONG,
        "python bench/accuracy.py MODEL.gguf ours": LONG,
        "python bench/first_answers.py http://127": LONG,
    },
    "playground.md": {
        "make serve        # then open http://127": START,
    },
    "processors.md": {
        "tureen serve --enable-custom-logit-proce": OPEN,
        "from tureen.logit_processor import Custo": OPEN,
    },
    "quantised-checkpoints.md": {
        "tureen serve --model-path /models/Qwen2.": PEER,
    },
    "quotas.md": {
        "printf 'alice  8kx0dJ2mF0sW1Yq5\\nbatch": OPEN,
        "tureen serve --api-key-file keys --usage": OPEN,
    },
    "releases.md": {
        "pip install 'tureen==0.1.*'          # t": LONG,
    },
    "reliability.md": {
        "tureen serve --engine process &": OPEN,
        "make coverage ARGS=quotas           # li": LONG,
    },
    "responses.md": {
        "tureen serve --responses-store /var/lib/": START,
        '  -d \'{"input": "My name is Ada.", "rid"': "tests/api/test_chat_pages.py",
    },
    "sampling.md": {
        "top_a: Annotated[float, Meta(ge=0, le=1,": SHOWN,
    },
    "scaling.md": {
        "tureen serve --replicas 2 &": "not run: it kills by name; tests/e2e/test_replicas_server.py kills an engine",
        "curl -X POST http://127.0.0.1:30000/repl": OPEN,
        "curl -X POST http://127.0.0.1:30000/upda": OPEN,
        "tureen serve --min-replicas 1 --max-repl": START,
        "tureen engine smollm2:135m --listen 127.": OPEN,
        "tureen engine MODEL --listen 0.0.0.0:700": PEER,
        "pip install 'tureen[ray]'": PEER,
        "tureen serve --api-workers 2 &": OPEN,
        "tureen serve --tensor-parallel-size 2": START,
        "tureen bench --growth     # a few minute": LONG,
    },
    "security.md": {
        "printf 'alice  8kx0dJ2mF0sW1Yq5\\n' > key": OPEN,
        "tureen serve --allowed-origins https://c": START,
        "curl -i http://127.0.0.1:30000/version -": OPEN,
        "curl http://127.0.0.1:30000/generate -H": OPEN,
        "# NAME KEY, one client a line": OPEN,
        "ver.key.pem                      # HTTPS": START,
        "openssl req -x509 -newkey ec -pkeyopt ec": OPEN,
        "touch index.txt; echo 01 > crlnumber": OPEN,
    },
    "sessions.md": {
        "import requests": OPEN,
    },
    "settings.md": {
        "tureen serve --context-length 4096": OPEN,
    },
    "several-models.md": {
        "make serve ARGS='--model pypi:llm-smollm": "tests/e2e/test_pages_of_commands.py",
        "models_memory = 8_000_000_000": "tests/e2e/test_pages_of_commands.py",
        "curl -s http://127.0.0.1:30000/status |": "tests/e2e/test_pages_of_commands.py",
        "curl http://127.0.0.1:30000/v1/embedding": "tests/e2e/test_pages_of_commands.py",
        "curl http://127.0.0.1:30000/models/load": "tests/e2e/test_pages_of_commands.py",
    },
    "status.md": {
        "tureen serve": START,
    },
    "streams.md": {
        "tureen serve --resume-grace 60": OPEN,
    },
    "structured-outputs.md": {
        '{"type": "structural_tag", "triggers": [': OPEN,
        '{"type": "structural_tag", "format": {"t': OPEN,
    },
    "terminal.md": {
        "n port 30000, or a model it loads itself": OPEN,
        "$ tureen chat --temperature 0.2": OPEN,
        'echo "What is the capital of France?" |': "tests/e2e/test_pages_of_commands.py",
        "cat > prompts.jsonl <<'END'": "tests/e2e/test_pages_of_commands.py",
    },
    "README.md": {
        "make serve        # creates .venv, fetch": START,
        "make serve PORT=8000 MODEL=/models/Llama": PEER,
        "pip install .": OPEN,
        "import tureen": OPEN,
    },
    "CONTRIBUTING.md": {
        "make install      # .venv with tureen in": LONG,
    },
}
