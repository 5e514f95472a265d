"""The paper's Figure 2, drawn from a trained run."""

from pathlib import Path

from modenorm.lab.data import load
from modenorm.lab.experiments.paper import Figure
from modenorm.lab.report import contact_sheet, make_gallery
from modenorm.lab.report.gallery import write_picture
from modenorm.lab.training import Run, load_model


def draw(figure: Figure, run: Run, data: Path, output: Path) -> None:
    """Write the picture of the test images that the modes of the figure's layers claim.

    Args:
        figure: What to show.
        run: Its training, done.
        data: Folder with the data sets' files.
        output: A picture, such as figure2.png.
    """
    model, checkpoint = load_model(run.checkpoint)
    name, about = checkpoint.config.dataset, checkpoint.about
    images = load(name, data).test
    scaling = (about.mean, about.std)
    gallery, _ = make_gallery(model, images, name, scaling, layers=figure.layers)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_picture(contact_sheet(gallery), output)
