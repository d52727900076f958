"""`SGLANG_EXTERNAL_MODEL_PACKAGE=fusedvit.serving.sglang_encoder`: SGLang imports it wherever it knows models.

The ranks of an encoder server but the first load no plugins: this does what loading ours would. A package of models of
your own imports this one.
"""

from fusedvit.serving.sglang import register

register()
