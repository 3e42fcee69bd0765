"""How Sphinx makes the site: `make site` builds it into out/site, with warnings as errors and without a network."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE.parent / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # what pages run finds the same modules
os.environ["OMP_NUM_THREADS"] = "1"  # pages run side by side

import numbers_from_records  # noqa: E402

import proxprop  # noqa: E402

project = "proxprop"
author = "the proxprop contributors"
release = version = proxprop.__version__
language = "en"
needs_sphinx = "9.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "mathml",
    "public_names",
    "command_line",
    "scrolling_figures",
]
exclude_patterns = [
    "gallery",
    "extensions",
    "auto_gallery/*.ipynb",
    "auto_gallery/*.py",
    "sg_execution_times.rst",
    "**/sg_execution_times.rst",
]
default_role = "code"
html_math_renderer = "mathml"

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "within_subsection_order": "gallery_order.Place",
    "filename_pattern": r"/plot_",
    "abort_on_example_error": True,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 5,
    "download_all_examples": False,
    "reset_modules": ("matplotlib",),
    "remove_config_comments": True,
    "capture_repr": (),  # what a script prints is shown, and no object's address
}

myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath", "substitution"]
myst_heading_anchors = 4
myst_substitutions = numbers_from_records.found()
nb_execution_mode = "force"
nb_execution_show_tb = True  # a cell that fails is a warning, and warnings are errors
nb_execution_timeout = 120
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autosummary_generate = False
napoleon_use_ivar = True
maximum_signature_line_length = 72

html_theme = "furo"
html_title = "proxprop"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_last_updated_fmt = None
linkcheck_anchors = False
