"""What the default model answers greedily on every machine: tests/models/test_smollm2.py measures how clearly.

With its weights as stored, instruction sets round differences between two tokens apart by up to some tenths.
"""

CLEAR = 0.5
"""Between the logarithms of the probabilities of the best two tokens, at each place of a recorded text."""
CAPITAL = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
SENTENCE = "The capital of France is"
RECORDED = {
    CAPITAL: ("The capital of France is Paris.<|im_end|>", 8),
    SENTENCE: (" Paris", 1),
}
"""By the prompt, the text and its number of tokens; what follows is not recorded."""
