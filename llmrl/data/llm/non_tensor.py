from llmrl.data.ragged.tensordicts import column, column_values  # noqa
