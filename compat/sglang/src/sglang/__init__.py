"""SGLang's names for what tureen has: `python -m sglang.launch_server`, and logit processors."""
