"""`sortattn report`: all results on one page that needs no network.

`sections` turns each kind of results file into headings, tables and pictures, `page` writes them as HTML, `command`
finds the files.
"""
