"""User interface of all commands: configuration, errors, logs, progress, help.

The lowest folder of the package. It imports no other folder, and only the standard library at
import time (click in the files of commands), so that `headrace.models` imports with torch alone
and `--help` answers at once.
"""
