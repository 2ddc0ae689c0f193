"""A build: tasks that turn a corpus into shards, and the commit of a dataset.

from headrace.tokenize.builder.build import BuildConfig, build

if __name__ == "__main__":  # worker processes import this file
    config = BuildConfig(inputs=("corpus/*.jsonl",), out="data/web", tokenizer="byte")
    print(build(config)["data/web"].tokens)
"""
