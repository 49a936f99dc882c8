# moved
from niss.files import write_output as write_atomically  # noqa: F401
from niss.report.run_folder import read_object as read_json_object  # noqa: F401
