"""JSON Schema: reads a schema into shapes, combines them, writes them as expressions of a language."""
