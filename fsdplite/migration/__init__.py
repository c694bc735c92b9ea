"""What a script uses of other engines, and what to write instead. Reads sources; imports and runs nothing of them.

``rule`` says what a table holds, ``engines`` lists the tables (one file an engine), ``finder`` reads a source with
them, ``report`` reads files and folders.
"""
