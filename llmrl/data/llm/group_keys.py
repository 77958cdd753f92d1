from llmrl.data.ragged.tensordicts import row_values  # noqa
