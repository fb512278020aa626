"""One module a framework: bring it up behind an OpenAI-compatible URL, answer for its memory, take it down."""
