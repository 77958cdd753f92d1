from llmrl.data.ragged.stack import RaggedStack, stack_columns  # noqa
