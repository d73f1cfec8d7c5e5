"""See sglang.srt.sampling."""
