"""Chat templates of model families, as jinja data read by `llmrl.data.llm.templates`."""
