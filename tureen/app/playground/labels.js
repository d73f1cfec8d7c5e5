// What parameters and constraints are called where people choose them. Their fields' names are shown beside it.

/** The parameters that most people use, in the order in which they are shown. */
export const OFTEN_USED = ["temperature", "max_new_tokens", "top_p", "stop", "sampling_seed"];

const PARAMETERS = {
  max_new_tokens: "Maximum answer length, in tokens",
  min_new_tokens: "Minimum answer length, in tokens",
  stop: "Stop at these texts",
  stop_token_ids: "Stop at these tokens",
  stop_regex: "Stop at these patterns",
  temperature: "Temperature",
  top_p: "Top tokens, by total probability",
  top_k: "Top tokens, by number",
  min_p: "Least probability, relative to the best",
  typical_p: "Tokens of typical surprise, by share",
  frequency_penalty: "Penalty for each repetition",
  presence_penalty: "Penalty for repeating at all",
  repeat_last_n: "Tokens that penalties look at",
  repetition_penalty: "Penalty for tokens of the prompt and the answer",
  ignore_eos: "Go on after the end of the answer",
  skip_special_tokens: "Leave special tokens out",
  spaces_between_special_tokens: "Spaces between special tokens",
  no_stop_trim: "Keep the stop text",
  n: "Number of answers",
  strict_schema: "Refuse what cannot be enforced",
  grammar_after: "Begin the constraint after",
  close_early: "Close the answer before the limit",
  logit_bias: "Raise or lower tokens",
  allowed_token_ids: "Allow only these tokens",
  bad_words: "Forbidden words",
  repetition_detection: "End an answer that repeats itself",
  custom_params: "Values for a logit processor",
  sampling_seed: "Seed",
  stream_interval: "Tokens per event of the stream",
};

const CONSTRAINTS = {
  json_schema: "JSON that follows a schema",
  regex: "Text that matches a regular expression",
  ebnf: "Text of a grammar",
  structural_tag: "Free text with constrained parts",
  choice: "One of several texts",
  dtype: "A Python value",
};

/** Returns the words for a field; its name in words, if it has none here. */
export const labelOf = (name) => PARAMETERS[name] ?? CONSTRAINTS[name] ?? name.replaceAll("_", " ");
