"""A guard over the masks of JSON schemas: it enforces, while an output is written, what no grammar can."""
