"""From a request to the token ids of its prompt, as its engine will see them, or the reason why not.

    question.py       body -> what is asked for, in the engine's own normal form      no tokenizer, no template
    model_folder.py   what a model's folder says: tokenizer.json, chat templates, special tokens
    template.py       a chat template in a sandbox with bounds of time and size       content_format.py: what it expects
    seams.py          where a text may be cut, so that the parts' ids are the whole's
    segment_cache.py  ids of the parts                                                local.py: all of these together
    engine.py         the engine's own POST /tokenize                                 self_test.py: do both agree?
    offload.py        threads with a bounded queue                                    tokens.py: Tokens, the one to ask

Only template.py, content_format.py and local.py need the extra kvgate[tokenizers], and only tokens.py imports them,
when a model is to be tokenized here.
"""
