"""A build: tasks turn a corpus into shards, a commit makes them a dataset.

from headrace.tokenize.builder.build import BuildConfig, build

if __name__ == "__main__":  # worker processes import this file
    config = BuildConfig(inputs=("corpus/*.jsonl",), out="data/web", tokenizer="byte")
    print(build(config)["data/web"].tokens)
"""
