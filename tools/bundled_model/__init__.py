"""Make the bundled model: tokenizer, weights, evaluation and model card, in one command.

    python -m tools.bundled_model

Everything the run needs is on the machine: the text is the Python standard library's own source (and the language
reference topics that ``pydoc`` carries), and the libraries are torch, tokenizers and safetensors. Steps:

1. collect the library's modules, drop duplicates and data tables, and hold out about 5 % of the files, chosen by a
   hash of the file's relative name (``text``);
2. train a byte-level BPE tokenizer on the rest (``tokenizer``) and encode it, with conversations derived from
   docstrings (``chat``), into epochs (``corpus``);
3. train a small Llama (``network``, its sizes in ``config``) on 1k windows, then 2k, then 8k (``training``), with Muon
   for the matrices and AdamW for embedding and norms (``step``);
4. round the weights to bfloat16, save, load the saved file again (``folder``) and measure held-out bits per byte at
   token positions 0-1023 and 7168-8191 of 8k windows (``evaluation``), then print samples (``samples``);
5. write the Hugging Face folder and its model card (``card``).

The folder is also written early and now and then during training, so that an interrupted run leaves a usable model.
``settings`` has the flags; ``__main__`` calls the steps in order.
"""
