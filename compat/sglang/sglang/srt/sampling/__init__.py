"""See custom_logit_processor."""
