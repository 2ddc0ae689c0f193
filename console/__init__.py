"""How every folder speaks with people: configuration in; errors, progress, logs and tables out.

The lowest floor of the house. It imports no other folder, and nothing beyond the standard
library until a function needs it, so that `headrace.models` still imports with torch alone and
`--help` answers at once.
"""
