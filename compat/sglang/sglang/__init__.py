"""Names of SGLang's that its documentation uses, served by tureen. This is not SGLang."""
