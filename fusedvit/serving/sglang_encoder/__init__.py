"""`SGLANG_EXTERNAL_MODEL_PACKAGE=fusedvit.serving.sglang_encoder`: SGLang imports it wherever it knows models.

A program that builds SGLang's encoder in its own process, as Dynamo's encode worker for SGLang does, loads no plugins.
This does what loading ours would. A package of models of your own imports this one.
"""

from fusedvit.serving.sglang import register

register()
